"""What an unlearning step would do to θ, measured on a few completions, without touching θ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from eepo.model.batching import MicroBatch, send
from eepo.model.policy import Policy, Scores
from eepo.types import Completion, Prompt

MAX_TRIES = 10
CLOSE_ENOUGH = 1.1  # a KL within this factor of its target ends the search
LR_BOUNDS = (1e-9, 1e3)
NEGLIGIBLE = 1e-2  # of a step: it has a ten-thousandth of the KL


@dataclass(frozen=True)
class Effect:
    loss_before: float  # the unlearning loss under θ
    loss_after: float  # under θ − lr · gradient
    kl: float  # KL(θ ‖ θ′) a token, on completions that θ sampled
    logprobs_after: dict[int, float] = field(
        default_factory=dict
    )  # of whole completions under θ′, by place in `pairs`


class Probe:
    """Scores up to `max_rows` of the given `rows` of `pairs` before and after a step.

    A quarter of them are the first ones, so that some prompts are seen whole; the others are evenly spread. What the
    pass for the gradient has seen of them before the step (`see`) is not computed again.
    """

    def __init__(
        self,
        policy: Policy,
        pairs: Sequence[tuple[Prompt, Completion]],
        rows: Sequence[int],
        max_rows: int,
        temperature: float,
        loss: Callable[[MicroBatch, Scores], Tensor | None],
        moved: Callable[[Mapping[str, Tensor], float], Mapping[str, Tensor]] | None = None,
        population: int = 0,
    ) -> None:
        self.policy, self.pairs, self.temperature, self.loss = policy, pairs, temperature, loss
        self.moved = moved or self._moved  # θ − lr · gradient, from whoever holds it
        self._last: tuple[Mapping[str, Tensor], float, Effect] | None = None
        whole, spread = rows[: max_rows // 4], rows[max_rows // 4 :]
        self.rows = [*whole, *spread[:: math.ceil(len(spread) / (max_rows - len(whole))) or 1]]
        self.scale = (population or len(pairs)) / len(self.rows)  # `loss` takes a share of these
        self._wanted = set(self.rows)
        self._places: dict[int, int] = {}  # of rows that were seen, in `_seen` laid end to end
        self._seen: list[Tensor] = []  # [columns of scores, rows, T]

    def see(self, batch: MicroBatch, scores: Scores) -> None:
        """Scores under θ of some of `pairs`."""
        own = {row: place for place, row in enumerate(batch.rows) if row in self._wanted}
        if not own:
            return
        for row in own:
            self._places[row] = len(self._places)
        columns = [
            c.detach()
            for c in (scores.logprobs, scores.entropies, scores.complements)
            if c is not None
        ]
        places = send(torch.tensor(list(own.values())), columns[0].device)  # without waiting for it
        self._seen.append(torch.stack(columns).index_select(1, places))

    @cached_property
    def before(self) -> list[tuple[MicroBatch, Scores, Tensor | None]]:
        for batch in self.policy.micro_batches(
            self.pairs, [row for row in self.rows if row not in self._places]
        ):
            self.see(batch, self.policy.score(batch, self.temperature))
        longest = max(part.shape[2] for part in self._seen)
        seen = torch.cat([pad(part, (0, longest - part.shape[2])) for part in self._seen], 1)
        found = []
        for batch in self.policy.micro_batches(self.pairs, self.rows):
            own = seen[:, [self._places[row] for row in batch.rows], : batch.mask.shape[1]]
            found.append((batch, scores := Scores(*own), self.loss(batch, scores)))
        return found

    def _moved(self, gradient: Mapping[str, Tensor], lr: float) -> dict[str, Tensor]:
        return {
            name: w - lr * gradient[name] if name in gradient else w
            for name, w in self.policy.named_weights()
        }

    @torch.no_grad()
    def measure(self, gradient: Mapping[str, Tensor], lr: float) -> Effect:
        """The gate is θ's own before the step, so both losses are over the same tokens."""
        if (
            self._last is not None and self._last[0] is gradient and self._last[1] == lr
        ):  # what a search ended on
            return self._last[2]
        moved = self.moved(gradient, lr)
        loss_before = loss_after = kl_sum = 0.0
        num_tokens = 0
        logprobs_after: dict[int, float] = {}
        for batch, scores, before in self.before:
            after = self.policy.score(batch, self.temperature, moved)
            gap = torch.where(batch.mask, after.logprobs - scores.logprobs, 0.0).double()
            kl_sum += float((gap.exp() - 1 - gap).sum())  # k3: never negative, little variance
            num_tokens += int(batch.mask.sum())
            whole = torch.where(batch.mask, after.logprobs, 0.0).double().sum(1).tolist()
            logprobs_after |= dict(zip(batch.rows, whole, strict=True))
            if before is not None:
                gated = Scores(after.logprobs, scores.entropies, after.complements)
                loss_before += float(before)
                loss_after += float(self.loss(batch, gated))  # type: ignore[arg-type]
        effect = Effect(
            loss_before * self.scale, loss_after * self.scale, kl_sum / num_tokens, logprobs_after
        )
        self._last = (gradient, lr, effect)
        return effect


def lr_for_kl(kl_of: Callable[[float], float], target: float, start: float) -> float:
    """A rate whose step moves θ by about `target` KL; `kl_of` says by how much one does.

    For small steps KL grows as the square of the rate, for larger ones faster: follow the slope between the last two
    tries, but stay inside the bracket they leave. If no try is close enough, the largest that did not overshoot.
    """
    lr, low, high = start, LR_BOUNDS[0], LR_BOUNDS[1]
    last: tuple[float, float] | None = None  # log lr, log kl
    for _ in range(MAX_TRIES):
        kl = kl_of(lr)
        if target / CLOSE_ENOUGH <= kl <= target * CLOSE_ENOUGH:
            return lr
        if kl < target:
            low = max(low, lr)
        else:  # too far, or not a number any more
            high = min(high, lr)
        here = (math.log(lr), math.log(kl)) if 0 < kl < math.inf else None
        lr = min(max(_follow_slope(last, here, lr, target, rising=kl < target), low), high)
        if lr in (low, high):
            lr = math.sqrt(low * high)
        last = here
    return low


@dataclass(frozen=True)
class Found:
    lr: float
    kl: float  # above the floor
    floor: float  # what rounding alone makes of a step that is next to nothing


def lr_above_floor(
    kl_of: Callable[[float], float], target: float, start: float, rounds: bool
) -> Found:
    """As `lr_for_kl`, where passes in bf16 may round: any step, however small, then has a KL that is not its own."""
    floor = kl_of(start * NEGLIGIBLE) if rounds else 0.0
    seen: dict[float, float] = {}

    def above(lr: float) -> float:
        seen[lr] = kl_of(lr) - floor
        return seen[lr]

    lr = lr_for_kl(above, target, start)
    if not any(
        kl > 0 or math.isnan(kl) for kl in seen.values()
    ):  # all of it is saturated: no rate moves θ
        lr = start
    return Found(lr, max(seen.get(lr, 0.0), 0.0), floor)


def _follow_slope(
    last: tuple[float, float] | None,
    here: tuple[float, float] | None,
    lr: float,
    target: float,
    rising: bool,
) -> float:
    """Where a line through the last two tries meets the target, on log scales; at most a factor of 10 away."""
    if here is None:
        return lr * 10 if rising else lr / 10
    moved = last is not None and last[0] != here[0]
    slope = (here[1] - last[1]) / (here[0] - last[0]) if moved and last is not None else 2.0
    step = (math.log(target) - here[1]) / min(max(slope, 1.0), 8.0)
    return lr * math.exp(min(max(step, -math.log(10)), math.log(10)))
