"""`model.generate` with one argument more: start a daemon first, with `radixkv serve` (its pool fits this model).

Three questions about one text, in one batch: the text is computed for the first row, the others find it. Run it again,
and the first row finds it too.
"""

from pathlib import Path

import torch

import radixkv
from radixkv.adapters import smollm2
from radixkv.adapters.transformers import generate

torch.set_num_threads(1)
model, tokenizer = smollm2.load()  # as AutoModelForCausalLM and AutoTokenizer give them
tokenizer.padding_side = "left"
text = (Path(__file__).parent / "harbour-handbook.md").read_text()[:900]
questions = ["When was the harbour founded?", "Who was Tobias Hale?", "Where is Skerrow?"]
prompts = [f"{text}\n\nQuestion: {question}\nAnswer:" for question in questions]
inputs = tokenizer(prompts, return_tensors="pt", padding=True)
asked = {**inputs, "max_new_tokens": 10}

computed = []  # how many tokens each forward sees
model.register_forward_pre_hook(lambda _, __, given: computed.append(given["input_ids"].numel()), with_kwargs=True)
plain = model.generate(**asked)
alone = sum(computed)
with radixkv.connect() as client:
    answers = generate(model, **asked, pool=client.pool("default"))

for question, answer in zip(questions, answers[:, inputs["input_ids"].shape[1] :], strict=True):
    print(f"{question} {tokenizer.decode(answer, skip_special_tokens=True).strip()}")
print(f"{sum(computed) - alone} tokens computed, by model.generate {alone}; equal: {torch.equal(answers, plain)}")
