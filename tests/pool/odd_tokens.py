"""Folders whose tokens and chat templates are in odd places."""

from collections.abc import Mapping

from tests.pool.odd_changes import (
    ADDED,
    BOM,
    END,
    FOR_TOOLS,
    JINJA,
    LEGACY,
    LFS,
    MAP,
    MARK,
    MINE,
    MORE,
    NEW,
    OTHER,
    START,
    TOKENIZER,
    TOKENS,
    UNREAD,
    Odd,
    all_of,
    bare,
    edited,
    flagged,
    put,
    setting,
    template,
    token,
    untemplated,
    without,
)
from tests.tiny import CHAT_TEMPLATE

TOKEN_FILES: Mapping[str, Odd] = {
    "listed in the config": Odd(
        bare(END, folder_config={"added_tokens_decoder": {"2": token(END)}})
    ),
    "in added_tokens.json": Odd(all_of(bare(START), put(ADDED, {START: 1}))),
    "an end in the map": Odd(
        all_of(bare(END), without(TOKENS, "eos_token"), put(MAP, {"eos_token": token(END)}))
    ),
    "a map that is not asked": Odd(
        all_of(
            bare(START, folder_config={"added_tokens_decoder": {"2": token(END)}}),
            without(TOKENS, "bos_token"),
            put(MAP, {"bos_token": START}),
        )
    ),
    "extra tokens": Odd(all_of(bare(START), setting(TOKENS, extra_special_tokens=[START]))),
    "extra tokens of the map": Odd(
        all_of(bare(START), put(MAP, {"extra_special_tokens": [{"content": START}]}))
    ),
    "extra tokens by name": Odd(
        all_of(
            bare(),
            setting(TOKENS, extra_special_tokens={"image_token": "<image>"}),
            template("{{ image_token }}" + CHAT_TEMPLATE),
        )
    ),
    "a token of its own name": Odd(
        all_of(
            setting(TOKENS, image_token="<image>"), template("{{ image_token }}" + CHAT_TEMPLATE)
        )
    ),
    "a new token far behind": Odd(
        all_of(setting(TOKENS, added_tokens_decoder={"300": token("<think>")}), template(NEW))
    ),
    "a new token of the map": Odd(
        all_of(template(NEW), put(MAP, {"sep_token": token("<think>", lstrip=True)}))
    ),
    "a new token in added_tokens.json": Odd(all_of(put(ADDED, {"<think>": 259}), template(NEW))),
    "new tokens everywhere": Odd(
        all_of(
            put(ADDED, {"<think>": 261, "<a>": 260}),
            put(MAP, {"additional_special_tokens": ["<b>", "<think>"], "mask_token": "<m>"}),
            template("<a><b><m>" + NEW),
        )
    ),
    "a padding token of its own": Odd(
        all_of(setting(TOKENS, pad_token="[PAD]"), template("[PAD]" + CHAT_TEMPLATE))
    ),
    "a token that takes the space before it": Odd(
        all_of(
            setting(TOKENS, added_tokens_decoder={"1": token(START, lstrip=True)}),
            template("a  " + CHAT_TEMPLATE),
        )
    ),
    "a token that is a word": Odd(
        all_of(
            setting(TOKENS, added_tokens_decoder={"259": token("ab", single_word=True)}),
            template("ab abc" + CHAT_TEMPLATE),
        )
    ),
    "a listed token that is not special": Odd(
        setting(TOKENS, added_tokens_decoder={"2": token(END, special=False)})
    ),
    "tokens that tokenizer.json says otherwise": Odd(
        all_of(
            flagged(START, lstrip=True, special=False),
            setting(TOKENS, added_tokens_decoder={"1": token(START)}),
            template("a  " + CHAT_TEMPLATE),
        )
    ),
    "a token as an object": Odd(setting(TOKENS, eos_token={"__type": "AddedToken", **token(END)})),
    "a token as an object without a type": Odd(
        setting(TOKENS, eos_token=token(END)), differs="the object says enough"
    ),
    "listed tokens that are null": Odd(
        setting(TOKENS, added_tokens_decoder={"2": None}), differs=UNREAD
    ),
    "listed tokens that are a list": Odd(
        setting(TOKENS, added_tokens_decoder=[token(END)]), differs=UNREAD
    ),
    "an empty list of tokens": Odd(
        all_of(bare(START), setting(TOKENS, added_tokens_decoder={}), put(ADDED, {START: 1}))
    ),
    "an end that is nowhere": Odd(setting(TOKENS, eos_token="</s>")),
    "ids as text": Odd(put(ADDED, {"<think>": "259"}), differs=UNREAD),
    "a map that is a list": Odd(put(MAP, ["<think>"]), differs=UNREAD),
    "a letter for padding": Odd(all_of(setting(TOKENS, pad_token="!"), template("!!" + OTHER))),
    "a letter in tokenizer.json": Odd(
        edited(TOKENIZER, lambda found: found["added_tokens"].append({"id": 3, **token("!")}))
    ),
    "a word of the question": Odd(
        setting(TOKENS, pad_token="there"), differs="no text of a client becomes a control token"
    ),
    "control tokens in pieces": Odd(
        setting(TOKENS, split_special_tokens=True), differs="no model was trained on the pieces"
    ),
    "a tokenizer that truncates": Odd(
        setting(
            TOKENIZER,
            truncation={
                "direction": "Right",
                "max_length": 3,
                "strategy": "LongestFirst",
                "stride": 0,
            },
        )
    ),
    "a tokenizer that pads": Odd(
        setting(
            TOKENIZER,
            padding={
                "strategy": {"Fixed": 64},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<|endoftext|>",
            },
        )
    ),
    "a tokenizer without added tokens": Odd(without(TOKENIZER, "added_tokens"), differs=UNREAD),
    "a side that is none": Odd(setting(TOKENS, padding_side="middle"), differs=UNREAD),
    "a class of Qwen": Odd(setting(TOKENS, tokenizer_class="Qwen2Tokenizer")),
    "a class that is not installed": Odd(
        setting(TOKENS, tokenizer_class="MistralCommonBackend"), differs=UNREAD
    ),
    "code for a tokenizer": Odd(
        setting(TOKENS, auto_map={"AutoTokenizer": ["evil.Slow", "evil.Fast"]})
    ),
}

TEMPLATES: Mapping[str, Odd] = {
    "a file before the config": Odd(put(JINJA, OTHER)),
    "a file with a mark": Odd(put(JINJA, BOM + CHAT_TEMPLATE.encode()), differs=MARK),
    "a file with line ends of Windows": Odd(put(JINJA, OTHER.replace("\n", "\r\n"))),
    "a file of nothing": Odd(put(JINJA, b""), differs="an empty template shows no message"),
    "a list with one for tools": Odd(
        setting(
            TOKENS,
            chat_template=[
                {"name": "default", "template": OTHER},
                {"name": "tool_use", "template": FOR_TOOLS},
            ],
        )
    ),
    "an object with one for tools": Odd(
        setting(TOKENS, chat_template={"default": OTHER, "tool_use": FOR_TOOLS})
    ),
    "one by another name": Odd(
        setting(TOKENS, chat_template=[{"name": "chatml", "template": OTHER}]),
        differs="a single template is the default",
    ),
    "a file before a list": Odd(
        all_of(
            setting(TOKENS, chat_template={"default": MINE, "tool_use": FOR_TOOLS}),
            put(JINJA, OTHER),
        )
    ),
    "a file, and one for tools": Odd(
        untemplated(put(JINJA, OTHER), put(f"{MORE}/tool_use.jinja", FOR_TOOLS))
    ),
    "both in the folder": Odd(
        untemplated(put(f"{MORE}/default.jinja", OTHER), put(f"{MORE}/tool_use.jinja", FOR_TOOLS))
    ),
    "the folder before the file": Odd(
        untemplated(put(JINJA, MINE), put(f"{MORE}/default.jinja", OTHER))
    ),
    "only one for tools in the folder": Odd(
        put(f"{MORE}/tool_use.jinja", FOR_TOOLS), differs="the config has the default one"
    ),
    "chat_template.json": Odd(
        untemplated(put(LEGACY, {"chat_template": OTHER})),
        differs="transformers reads it for images only",
    ),
    "chat_template.json after a file": Odd(
        untemplated(put(JINJA, OTHER), put(LEGACY, {"chat_template": MINE}))
    ),
    "a list of nothing": Odd(setting(TOKENS, chat_template=[]), "has no chat template"),
    "a number": Odd(setting(TOKENS, chat_template=5), "has no chat template"),
    "a file in Latin-1": Odd(put(JINJA, b"\xe9" + OTHER.encode()), "chat_template.jinja can't be"),
    "a folder for a file": Odd(
        lambda folder: (folder / JINJA).mkdir(), "is not a file", differs="it is damage"
    ),
    "a pointer": Odd(
        put(JINJA, LFS), r"chat_template\.jinja is a Git LFS pointer", differs="it is damage"
    ),
    "all tokens by name": Odd(
        template("{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}" + OTHER)
    ),
    "a loop that breaks": Odd(
        template("{% for i in range(3) %}{% if i == 1 %}{% break %}{% endif %}{% endfor %}" + OTHER)
    ),
    "the date": Odd(template("{{ strftime_now('%Y') }}" + OTHER)),
    "one that refuses": Odd(template("{{ raise_exception('no') }}"), "refuses these messages: no"),
    "one that includes": Odd(template("{% include 'x' %}"), "refuses these messages: no loader"),
    "one that calls what is not there": Odd(
        template("{{ foo() }}" + OTHER), "^odd: .*'foo' is undefined.* `chat_template:`"
    ),
    "none": Odd(untemplated(), "has no chat template"),
    "one that can't be compiled": Odd(template("{% if %}"), "can't be compiled"),
    "a mark for training": Odd(
        template(
            CHAT_TEMPLATE.replace("{%- endfor", "{% generation %}x{% endgeneration %}{%- endfor")
        )
    ),
}
