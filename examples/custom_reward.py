"""Train on your own problems with your own reward, through the Python API.

    python examples/custom_reward.py [FOLDER [STEPS]]

This small policy needs no GPU. For your model, set `model.path` and another template.
"""

import ast
import json
import operator
import random
import sys
from pathlib import Path

import eepo

OPERATORS = {"Add": operator.add, "Sub": operator.sub, "Mult": operator.mul}


def reward(completion: str, numbers: list[int], target: int) -> float:
    """Give 1 if the expression uses all numbers and equals the target, and less if it is close.

    `numbers` and `target` are columns of the data. Completions are hostile input: no `eval`.
    """
    try:
        tree = ast.parse(completion.strip(), mode="eval").body
        used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        distance = abs(evaluate(tree) - target)
    except (SyntaxError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 0.0
    if sorted(used) != sorted(numbers):
        return 0.0
    return 1.0 if distance == 0 else 0.5 / (1 + distance)


def evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant):
        return node.value
    return OPERATORS[type(node.op).__name__](evaluate(node.left), evaluate(node.right))


def problem(rng: random.Random) -> dict:
    numbers, target = [rng.randint(1, 12) for _ in range(4)], rng.randint(10, 60)
    text = f"{' '.join(map(str, numbers))} = {target} :"
    return {"problem": text, "answer": target, "numbers": numbers, "target": target}


def main(folder: str = "runs/custom_reward", steps: str = "20") -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    data, rng = Path(folder, "problems.jsonl"), random.Random(0)
    data.write_text("".join(json.dumps(problem(rng)) + "\n" for _ in range(500)))
    task = {"name": "dataset", "train": str(data), "template": "{problem}", "num_held_out": 50}
    batch = {"training.prompts_per_step": 32, "training.prompts_per_mini_batch": 16}
    recipe = {"extends": "countdown/eepo", "task": task, "training": {"num_steps": int(steps)}}
    result = eepo.train(recipe, Path(folder, "run"), set=batch, reward=reward)
    print("pass@k on held-out problems:", result.final_evaluation["in_distribution"]["pass@k"])


if __name__ == "__main__":  # the grading processes import this file
    main(*sys.argv[1:])
