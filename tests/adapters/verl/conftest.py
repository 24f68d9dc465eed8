"""Runs verl five times on two CPU ranks.

The runs are GRPO, EEPO, EEPO resumed, EEPO with a KL target, and EEPO with full credit.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

from verl_runs import TEMPERATURE, VerlRun, entropy, run_verl, stage_rows


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny

    folder = tmp_path_factory.mktemp("tiny")
    tiny.write_model(folder)
    tiny.write_prompts(folder / "prompts.parquet")
    return folder


@pytest.fixture(scope="session")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    return run_verl("verl.trainer.main_ppo", model, tmp_path_factory.mktemp("stock"), [])


@pytest.fixture(scope="session")
def stage_1_entropies(stock: VerlRun) -> tuple[float, float]:
    """Return the stage-1 entropies of steps 1 and 2.

    They come from the first half of each group of the stock run: EEPO's stage 1 samples the same.
    """
    first, second = (entropy(stage_rows(stock.completions(push), 0, 2)) for push in (1, 2))
    assert second < first - 0.02, "the tests need a lower entropy in step 2"
    return first, second


@pytest.fixture(scope="session")
def eepo(
    model: Path, stage_1_entropies: tuple[float, float], tmp_path_factory: pytest.TempPathFactory
) -> VerlRun:
    """Run with a step gate that is shut in step 1 and open in step 2.

    The threshold is between step 1's entropy and the mean of both, so the gate needs its history.
    """
    first, second = stage_1_entropies
    threshold = (first + (first + second) / 2) / 2
    knobs = [
        "eepo.gate=step",
        f"eepo.gate_threshold={threshold}",
        "eepo.gate_window=2",
        "eepo.unlearn_lr=1",
    ]
    return run_verl(
        "eepo.adapters.verl", model, tmp_path_factory.mktemp("eepo"), [*knobs, "eepo.debug=true"]
    )


@pytest.fixture(scope="session")
def resumed(model: Path, eepo: VerlRun, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """Resume after step 1, with a token gate, four stages and advantage weights."""
    folder = tmp_path_factory.mktemp("resumed")
    shutil.copytree(eepo.folder / "checkpoints/global_step_1", folder / "checkpoints/global_step_1")
    (folder / "checkpoints/latest_checkpointed_iteration.txt").write_text("1")
    state = folder / "checkpoints/global_step_1/eepo.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"auto_lr": 0.5}))
    knobs = [
        "actor_rollout_ref.rollout.n=8",
        "eepo.num_stages=4",
        "eepo.gate=token",
        "eepo.gate_threshold=4.2",
        "eepo.gate_window=2",
    ]
    weights = ["eepo.stage2_negative_advantages=false", "eepo.failure_weight=0.25"]
    return run_verl(
        "eepo.adapters.verl",
        model,
        folder,
        [*knobs, *weights, "eepo.unlearn_lr=1", "eepo.debug=true"],
    )


@pytest.fixture(scope="session")
def kl_target(model: Path, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """Run one step with a KL target that unlearns failures among five rows and one padding row.

    Micro-batches are cut by tokens.
    """
    knobs = [
        "eepo.gate=always",
        "eepo.unlearn_lr=auto",
        "eepo.unlearn_kl_target=0.02",
        "eepo.debug=true",
    ]
    knobs += ["eepo.unlearn_on=unrewarded", "eepo.unlearn_max_completions=5"]
    sizes = [
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
    ]
    return run_verl(
        "eepo.adapters.verl", model, tmp_path_factory.mktemp("kl"), [*knobs, *sizes], num_steps=1
    )


@pytest.fixture(scope="session")
def full_credit(model: Path, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """Run one step in which verl computes all denominators, with exact saturation."""
    knobs = ["eepo.gate=always", "eepo.unlearn_lr=1", "eepo.credit=full", "eepo.debug=true"]
    knobs += ["eepo.saturation=exact", "eepo.unlearn_eps=0.5"]
    knobs += [
        "algorithm.rollout_correction.bypass_mode=false",
        f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
    ]
    return run_verl(
        "eepo.adapters.verl", model, tmp_path_factory.mktemp("full"), knobs, num_steps=1
    )
