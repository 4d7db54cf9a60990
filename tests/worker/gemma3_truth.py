"""Writes transformers' answers about pictures, with which `test_sight.py` compares Gemma 3's.

Run it where torch, transformers and Pillow are installed, on the folder of the test's checkpoint
and the test's prompts: `python gemma3_truth.py FOLDER PROMPTS.json > gemma3_truth.json`. Each
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
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

folder, prompts = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text("utf-8"))
config = json.loads((folder / "config.json").read_text("utf-8"))
text = config["text_config"]
text["layer_types"] = ["sliding_attention", "full_attention"] * 2
text["rope_parameters"] = {
    "full_attention": {"rope_type": "default", "rope_theta": text["rope_theta"]},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
ids = {"image_token_id": config["image_token_index"]}
made = Gemma3Config(**{**config, **ids, "attn_implementation": "eager"})
model = Gemma3ForConditionalGeneration(made).eval()
weights = {}
for name, tensor in load_file(folder / "model.safetensors").items():
    own = name.replace("language_model.model.", "model.language_model.")
    own = own.replace("language_model.lm_head", "lm_head")
    if name.startswith(("vision_tower.", "multi_modal_projector.")):
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
if unexpected or any(".head." not in name for name in missing):
    sys.exit(f"missing: {missing}, unexpected: {unexpected}")
process = Gemma3ImageProcessorPil(
    **json.loads((folder / "preprocessor_config.json").read_text("utf-8"))
)
answers = []
for prompt in prompts:
    images = []
    for seed, width, height in prompt["images"]:
        noise = np.random.default_rng(seed).integers(0, 255, (6, 9, 3), np.uint8)
        images.append(Image.fromarray(noise).resize((width, height), 3))
    pixels = process(images, return_tensors="pt")["pixel_values"]
    ids = list(prompt["ids"])
    tokens, logits = [], []
    for _ in range(8):
        given = torch.tensor([ids])
        kinds = (given == config["image_token_index"]).long()
        with torch.no_grad():
            output = model(input_ids=given, pixel_values=pixels, token_type_ids=kinds)
        logits = output.logits[0, -1]
        top = logits.log_softmax(-1).topk(5)
        tokens.append({int(i): round(float(v), 4) for v, i in zip(*top, strict=True)})
        ids.append(int(logits.argmax()))
    answers.append({**prompt, "answer": ids[-8:], "logprobs": tokens})
json.dump(answers, sys.stdout)
