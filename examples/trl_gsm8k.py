"""Train a model of the hub on GSM8K with EEPO in TRL.

    pip install 'eepo[trl] @ git+https://github.com/eepo/eepo'
    python examples/trl_gsm8k.py
    eepo report runs/trl_gsm8k --out report.html

Several GPUs: accelerate launch --multi_gpu examples/trl_gsm8k.py
"""

import argparse

import torch
from datasets import load_dataset

import eepo
from eepo.adapters.trl import EEPOConfig, EEPOTrainer

INSTRUCTION = "\nThink step by step, then write the final answer within \\boxed{}."


def to_prompt(row: dict) -> dict:
    prompt = [{"role": "user", "content": row["question"] + INSTRUCTION}]
    return {"prompt": prompt, "gold": row["answer"].split("####")[-1].strip()}


def correct(completions: list, gold: list[str], **_: object) -> list[float]:
    """Return 1 if the final answer equals the gold answer, else 0."""
    texts = [messages[0]["content"] for messages in completions]
    pairs = zip(texts, gold, strict=True)
    verdicts = eepo.grade([{"completion": text, "gold": answer} for text, answer in pairs])
    return [verdict.reward for verdict in verdicts]


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="hub name or folder")
parser.add_argument("--data", default="openai/gsm8k", help="data set with a config `main`")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--max-tokens", type=int, default=512, help="of a completion")
parser.add_argument("--out", default="runs/trl_gsm8k")
options = parser.parse_args()

args = EEPOConfig(
    output_dir=options.out,
    max_steps=options.steps,
    max_completion_length=options.max_tokens,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=4,
    num_generations=8,
    learning_rate=1e-6,
    bf16=torch.cuda.is_available(),  # computes in bf16; TRL loads the weights in fp32
    credit="full",  # the options of EEPO (docs/trl.md)
    saturation="exact",
    gate="always",
    unlearn_kl_target=1e-2,
    unlearn_max_completions=32,
    logging_steps=1,
    save_steps=0.25,  # four checkpoints; `eepo report` reads the log in the newest one
)
data = load_dataset(options.data, "main", split="train").map(to_prompt)
EEPOTrainer(model=options.model, reward_funcs=correct, args=args, train_dataset=data).train()
