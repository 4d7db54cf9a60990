"""How the model's turn begins in the prompts of different families.

A prompt ends with this text. A model may write it once more, and a server may pass it on: at the
beginning of an answer it is no part of the text.
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
