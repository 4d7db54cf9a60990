"""How the turn of the model begins in the prompts of different families.

A prompt ends with it. A model that writes it once more, or a server that hands it on, spells it out
at the beginning of an answer, where it is no text.
"""

TURN_HEADERS = (
    "<|im_start|>assistant",
    "<|start_header_id|>assistant<|end_header_id|>",
    "<|header_start|>assistant<|header_end|>",
    "<|start_of_role|>assistant<|end_of_role|>",
    "<|im_assistant|>assistant<|im_middle|>",
    "<start_of_turn>model",
    "<|turn>model",
    "<|assistant|>",
    "<|assistant_start|>",
    "<|begin_assistant|>",
    "<|bom|><|assistant|>",
    "<｜Assistant｜>",
    "[|assistant|]",
    "<role>ASSISTANT</role>",
    "<longcat_assistant>",
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
)
