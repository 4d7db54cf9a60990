"""Of `/tokenize` and `/detokenize`."""

from collections.abc import Mapping

from pydantic import BaseModel

from mlx_server.api import tokenize
from tests.hostile.parameters.case import Shown

WIRE = "tests/api/tokenize/test_tokenize_wire.py"
PROMISES = "tests/api/test_promises.py"
TOKENIZER = "tests/models/test_tokenizer.py"

ENDS = f"{WIRE}::test_where_the_prompt_ends"
SPECIAL = f"{TOKENIZER}::test_special_tokens_of_a_text_are_added_or_not"

TOKENIZING: Mapping[type[BaseModel], Mapping[str, Shown]] = {
    tokenize.TokenizeBody: {
        "model": f"{PROMISES}::test_an_unknown_model_is_named",
        "prompt": f"{WIRE}::test_a_text",
        "content": f"{WIRE}::test_a_content_has_no_special_tokens_of_its_own",
        "add_special": f"{WIRE}::test_a_content_has_no_special_tokens_of_its_own",
        "parse_special": f"{WIRE}::test_names_of_special_tokens_in_a_content",
        "with_pieces": f"{WIRE}::test_pieces_are_texts_or_bytes",
        "messages": f"{WIRE}::test_messages_are_counted_as_they_are_answered",
        "tools": f"{WIRE}::test_tools_count",
        "chat_template_kwargs": "tests/generation/test_tokenization.py::test_template_kwargs",
        "chat_template": f"{PROMISES}::test_values_are_refused_by_their_name_or_taken",
        "add_generation_prompt": ENDS,
        "continue_final_message": ENDS,
        "add_special_tokens": SPECIAL,
        "return_token_strs": f"{WIRE}::test_token_strings_are_those_of_the_vocabulary",
    },
    tokenize.DetokenizeBody: {
        "model": f"{PROMISES}::test_an_unknown_model_is_named",
        "tokens": f"{WIRE}::test_there_and_back",
    },
}
