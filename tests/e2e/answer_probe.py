"""Runs in a process of its own that cannot import this repository: answers questions with an exported folder.

argv: the folder, a JSON file with a list of conversations (HF content parts, media by path), and the file to
write the answers to.
"""

import importlib.util
import json
import sys

import torch
from transformers import AutoModelForMultimodalLM, AutoProcessor


def main(folder, questions, answers):
    torch.set_num_threads(1)
    assert importlib.util.find_spec("omni_ds") is None
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForMultimodalLM.from_pretrained(folder, trust_remote_code=True).eval()
    given = []
    with open(questions) as file:
        conversations = json.load(file)
    for conversation in conversations:
        inputs = processor.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        given.append(processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    with open(answers, "w") as file:
        json.dump(given, file)


main(*sys.argv[1:])
