"""Writes transformers' answers about pictures, with which `test_sight.py` compares Gemma's.

Run it where torch, transformers and Pillow are installed, on the folder of the test's checkpoint
and the test's prompts: `python gemma_truth.py FOLDER PROMPTS.json > gemma3_truth.json`. Each
prompt has its token ids and the sizes and seeds of its pictures.
"""

# mypy: ignore-errors

import json
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

folder, prompts = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text("utf-8"))
config = json.loads((folder / "config.json").read_text("utf-8"))
settings = json.loads((folder / "preprocessor_config.json").read_text("utf-8"))
text = config["text_config"]
if config["model_type"] == "gemma3":
    text["layer_types"] = ["sliding_attention", "full_attention"] * 2
    text["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": text["rope_theta"]},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    token = config["image_token_id"] = config["image_token_index"]
    process = Gemma3ImageProcessorPil(**settings)
    kinds_name, make, made = "token_type_ids", Gemma3ForConditionalGeneration, Gemma3Config
else:
    token = config["image_token_id"]
    # as mlx-lm has them where the files do not say
    text |= {"use_double_wide_mlp": True, "final_logit_softcapping": 30.0}
    config["tie_word_embeddings"] = True
    names = vars(sys.modules[Gemma4ImageProcessorPil.__module__])
    names["_SUPPORTED_SOFT_TOKENS"] = (settings["max_soft_tokens"],)  # fewer than it allows
    process = Gemma4ImageProcessorPil(**settings)
    kinds_name, make, made = "mm_token_type_ids", Gemma4ForConditionalGeneration, Gemma4Config
model = make(made(**{**config, "attn_implementation": "eager"})).eval()
weights = {}
for name, tensor in load_file(folder / "model.safetensors").items():
    own = name.replace("language_model.model.", "model.language_model.")
    own = own.replace("language_model.lm_head", "lm_head")
    if name.startswith(("vision_tower.", "multi_modal_projector.", "embed_vision.")):
        own = f"model.{name}"
    weights[own] = tensor.permute(0, 3, 1, 2) if "patch_embedding.weight" in name else tensor
known = set(model.state_dict())
missing, unexpected = model.load_state_dict(
    {
        (n if n in known else n.replace("vision_tower.vision_model.", "vision_tower.")): t
        for n, t in weights.items()
    },
    strict=False,
)
if unexpected or any(".head." not in n and "lm_head" not in n for n in missing):
    sys.exit(f"missing: {missing}, unexpected: {unexpected}")
model.tie_weights()
answers = []
for prompt in prompts:
    images = []
    for seed, width, height in prompt["images"]:
        noise = np.random.default_rng(seed).integers(0, 255, (6, 9, 3), np.uint8)
        images.append(Image.fromarray(noise).resize((width, height), 3))
    inputs = process(images, return_tensors="pt")
    inputs.pop("num_soft_tokens_per_image", None)
    inputs.pop("num_crops", None)
    ids = list(prompt["ids"])
    tokens, logits = [], []
    for _ in range(8):
        given = torch.tensor([ids])
        kinds = (given == token).long()
        with torch.no_grad():
            output = model(input_ids=given, **{kinds_name: kinds}, **inputs)
        logits = output.logits[0, -1]
        top = logits.log_softmax(-1).topk(5)
        tokens.append({int(i): round(float(v), 4) for v, i in zip(*top, strict=True)})
        ids.append(int(logits.argmax()))
    answers.append({**prompt, "answer": ids[-8:], "logprobs": tokens})
json.dump(answers, sys.stdout)
