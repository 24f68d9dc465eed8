"""A decode step with few live rows: its matrix products, its attention and its draw, against the time to read what they
read.

    python benchmarks/few_rows.py  # products of two shapes, and draws
    python benchmarks/few_rows.py --attention 3B  # by how it is split among programs
    python benchmarks/few_rows.py --profile 3B --compiled [--unpacked]  # the kernels of one step of the engine

Products run in CUDA graphs, each over copies of its matrix that do not fit into the card's cache together. A cell is
microseconds and the share of the measured copy rate. `q+k+v` and `gate+up` are one product for all of them, as compiled
layers of the engine compute it (`rollout/packed.py`) unless the profile is to be `--unpacked`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import shapes
import torch
from torch import Tensor
from torch.nn.functional import linear

from eepo import kernels
from eepo.kernels.row_state import Outputs, RowState
from eepo.model.compilation import compile_layers
from eepo.model.lm_head import wide_product
from eepo.rollout.fused_linear import compile_packed
from eepo.rollout.paged.cuda_graphs import Buffers
from eepo.rollout.paged.scheduler import AHEAD, PAGE

SPREAD = 256 << 20  # bytes of copies: five times an H200's cache
MAX_COPIES = 96
CONTEXTS = (
    "8:1800,16:1200,32:900,64:700,128:600,256:450,512:320,1024:200,1024:380"  # as a long tail goes
)
WAYS = ("256:16:4:3,512:16:4:3,1024:16:4:3,2048:16:4:3,1024:32:4:3,1024:16:2:3,1024:16:8:3,1024:16:4:2,1024:16:4:4,"
        "1024:16:4:5")  # fmt: skip


@dataclass(frozen=True)
class Product:
    name: str
    num_columns: int
    length: int
    bias: bool = False
    per_step: int = 1  # how often, as the model asks
    packed_per_step: int = 1  # how often, if products with the same input are one

    def num_bytes(self, num_rows: int) -> int:
        moved = (
            self.num_columns * self.length + num_rows * self.length + num_rows * self.num_columns
        )
        return 2 * moved + (
            2 * num_rows * self.num_columns if self.name == "head" else 0
        )  # its logits are fp32


def products_of(shape: str) -> list[Product]:
    config = shapes.config(shape)
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    keys = hidden // config.num_attention_heads * config.num_key_value_heads
    return [
        Product("q", hidden, hidden, True, layers, 0),
        Product("k, v", keys, hidden, True, 2 * layers, 0),
        Product("q+k+v", hidden + 2 * keys, hidden, True, 0, layers),
        Product("o", hidden, hidden, False, layers, layers),
        Product("gate, up", inner, hidden, False, 2 * layers, 0),
        Product("gate+up", 2 * inner, hidden, False, 0, layers),
        Product("down", hidden, inner, False, layers, layers),
        Product("head", shapes.VOCABULARY, hidden),
    ]


# --- timing


def microseconds(
    works: Sequence[Callable[[], Any]], device: torch.device, before: Callable[[], Any]
) -> float:
    """Of one of `works`, in one graph of all of them; the median of a few replays, each after `before`."""

    def all_of_them() -> None:
        for work in works:
            work()

    works[0]()  # compiles
    play: Callable[[], Any] = all_of_them
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_of_them()
        play = graph.replay
    taken = []
    for _ in range(5):
        before()
        taken.append(_seconds(play, device))
    return 1e6 * statistics.median(taken[1:]) / len(works)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """By the card's clock, where there is one."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


# --- products


def product_table(shape: str, args: argparse.Namespace, device: torch.device, rate: float) -> str:
    rows, times = [], {}
    for product in products_of(shape):
        matrices, bias = _copies(product, device)
        for num_rows in map(int, args.rows.split(",")):
            taken = times[product, num_rows] = _product_microseconds(
                product, num_rows, matrices, bias, device
            )
            share = product.num_bytes(num_rows) / rate / (taken * 1e-6)
            rows.append([product.name, num_rows, f"{taken:.1f} ({100 * share:.0f} %)"])
        del matrices
    listed = shapes.table(["product", "rows", "torch"], rows)
    return f"\n{shape}, microseconds (share of the copy rate)\n{listed}\n\n{_step_table(shape, times, args)}"


def _step_table(shape: str, times: dict[Any, float], args: argparse.Namespace) -> str:
    """Of all products of a step: one by one, and with those of one input as one."""
    rows = []
    for num_rows in map(int, args.rows.split(",")):
        taken = {one: times[one, num_rows] for one in products_of(shape)}
        apart = sum(each * one.per_step for one, each in taken.items())
        packed = sum(each * one.packed_per_step for one, each in taken.items())
        rows.append([num_rows, f"{apart / 1000:.2f}", f"{packed / 1000:.2f}"])
    return f"{shape}, ms a step, products alone\n" + shapes.table(["rows", "torch", "packed"], rows)


def _copies(product: Product, device: torch.device) -> tuple[list[Tensor], Tensor | None]:
    """Random: a card that multiplies zeros draws less power, and is faster."""
    each = 2 * product.num_columns * product.length
    number = max(2, min(MAX_COPIES, -(-SPREAD // each))) if device.type == "cuda" else 1
    size = product.num_columns, product.length
    matrices = [torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(number)]
    return matrices, torch.randn(
        size[0], device=device, dtype=torch.bfloat16
    ) if product.bias else None


def _product_microseconds(
    product: Product,
    num_rows: int,
    matrices: list[Tensor],
    bias: Tensor | None,
    device: torch.device,
) -> float:
    x = torch.randn(num_rows, product.length, device=device, dtype=torch.bfloat16)
    multiply = wide_product if product.name == "head" else partial(_linear, bias=bias)
    return microseconds([partial(multiply, x, matrix) for matrix in matrices], device, lambda: None)


def _linear(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, matrix, bias)


# --- attention


def attention_table(args: argparse.Namespace, device: torch.device, rate: float) -> str:
    """A column for each way: programs to have at least, most splits of a row, warps, stages."""
    ways = [tuple(map(int, way.split(":"))) for way in args.ways.split(",")]
    lines = []
    for case in args.contexts.split(","):
        num_rows, length = map(int, case.split(":"))
        given, num_bytes = _attention_inputs(args.attention, num_rows, length, device)
        cells = []
        for way in ways:
            taken = _attention_microseconds(given, way, device)
            cells.append(f"{taken:.1f} ({100 * num_bytes / rate / (taken * 1e-6):.0f} %)")
        lines.append([num_rows, length, *cells])
    head = ["rows", "tokens", *args.ways.split(",")]
    title = f"attention of one layer, {args.attention}, microseconds (share of the copy rate)"
    return f"\n{title}\n{shapes.table(head, lines)}"


def _attention_inputs(
    shape: str, num_rows: int, length: int, device: torch.device
) -> tuple[list[tuple[Tensor, ...]], int]:
    """Of as many layers as the card's cache cannot hold, and the bytes that one of them reads."""
    config = shapes.config(shape)
    size, heads = config.hidden_size // config.num_attention_heads, config.num_key_value_heads
    width = length // PAGE + 1
    num_bytes = 2 * 2 * num_rows * length * heads * size
    number = max(2, min(MAX_COPIES, -(-SPREAD // num_bytes))) if device.type == "cuda" else 1
    tables = torch.randperm(num_rows * width, device=device).view(num_rows, width).int()
    positions = torch.full((num_rows,), length, device=device)

    def some(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, dtype=torch.bfloat16)

    query = some(num_rows, config.num_attention_heads, size)
    new = [some(num_rows, heads, size) for _ in range(2)]
    pools = [[some(num_rows * width, heads, PAGE, size) for _ in range(2)] for _ in range(number)]
    return [(query, *new, *pool, tables, positions) for pool in pools], num_bytes


def _attention_microseconds(
    given: list[tuple[Tensor, ...]], way: tuple[int, ...], device: torch.device
) -> float:
    attention = kernels.chosen("paged_attention", device)
    if device.type == "cuda":
        from eepo.kernels import paged_attention as module

        module.PROGRAMS, module.MOST_SPLITS, module.WARPS, module.STAGES = way
    return microseconds([partial(attention, *one, 0.1) for one in given], device, lambda: None)


# --- draws


def draw_table(args: argparse.Namespace, device: torch.device, rate: float) -> str:
    lines = []
    for num_rows in map(int, args.draws.split(",")):
        taken = _draw_microseconds(num_rows, device)
        share = num_rows * shapes.VOCABULARY * 4 / rate / (taken * 1e-6)
        lines.append([num_rows, f"{taken:.1f} ({100 * share:.0f} %)"])
    return (
        f"\ndraws, microseconds (share of the copy rate)\n{shapes.table(['rows', 'draw'], lines)}"
    )


def _draw_microseconds(num_rows: int, device: torch.device, repeats: int = 20) -> float:
    draw = kernels.chosen("sample_tokens", device)
    state, outputs = RowState.of(num_rows, device), _outputs(num_rows, repeats + 1, device)
    every, temperature = torch.arange(num_rows, device=device), torch.ones(1, device=device)
    state.outputs.copy_(every)
    state.keys.copy_(every * 7919)
    state.limits.fill_(1 << 40)
    state.live.fill_(1)
    num_copies = max(2, min(repeats, -(-SPREAD // (num_rows * shapes.VOCABULARY * 4))))
    logits = [
        3 * torch.randn(num_rows, shapes.VOCABULARY, device=device) for _ in range(num_copies)
    ]
    ends = torch.full((1,), -1, device=device)
    works = [
        partial(draw, logits[turn % num_copies], every, every, temperature, ends, state, outputs)
        for turn in range(repeats if device.type == "cuda" else 1)
    ]
    return microseconds(works, device, state.num_drawn.zero_)


def _outputs(num_lines: int, width: int, device: torch.device) -> Outputs:
    whole = [
        torch.zeros(num_lines, width, dtype=kind, device=device)
        for kind in (torch.int32, *[torch.float32] * 2)
    ]
    return Outputs(*whole, *torch.zeros(2, num_lines, dtype=torch.int32, device=device))


# --- a step of the engine


def profile(args: argparse.Namespace, device: torch.device) -> None:
    """Rows in the midst of things, each with pages of its own."""
    sizes = [int(size) for size in args.profile_rows.split(",")]
    most = max(sizes)
    engine = shapes.Forced(shapes.new_model(args.profile, torch.bfloat16, device), most, {})
    if problem := engine.unusable():
        raise SystemExit(f"the paged engine cannot be used here: {problem}")
    if args.compiled:
        (compile_layers if args.unpacked else compile_packed)(engine.model)
    width = -(-(args.length + AHEAD) // PAGE) + 2
    buffers = Buffers(engine, most * width + 1, most, args.length + PAGE, most, PAGE)
    buffers.reset(1.0)
    buffers.tables[:, :width] = (
        1 + torch.arange(most * width, device=device).view(most, width).int()
    )
    for num_rows in sizes:
        _put_in_the_midst(buffers, args.length)
        with torch.inference_mode():
            buffers.step(num_rows)  # captured
            buffers._graphs.clear()
            buffers._memory = None  # it went with them
            again = _seconds(partial(buffers.step, num_rows), device)  # as later calls do
            _put_in_the_midst(buffers, args.length)
            print(f"\ncaptured again and run in {1000 * again:.0f} ms")
            _print_kernels(buffers, num_rows, args, device)


def _put_in_the_midst(buffers: Any, length: int) -> None:
    state = buffers.state
    state.positions.fill_(length)
    state.num_drawn.zero_()
    state.limits.fill_(1 << 40)
    state.outputs.copy_(buffers.every)
    state.live.fill_(1)


def _step_seconds(step: Callable[[], Any], device: torch.device, turns: int = 8) -> float:
    """Of one of several in a row, as the engine queues them: the card does not wait for the host then."""

    def several() -> None:
        for _ in range(turns):
            step()

    return _seconds(several, device) / turns


def _print_kernels(
    buffers: Any, num_rows: int, args: argparse.Namespace, device: torch.device, turns: int = 4
) -> None:
    step = partial(buffers.step, num_rows)
    alone = statistics.median(_step_seconds(step, device) for _ in range(turns))
    with torch.profiler.profile() as seen:
        for _ in range(turns):
            step()
        shapes.wait(device)
    on_card = device.type == "cuda"
    rows = []
    for one in seen.key_averages():
        taken = (one.self_device_time_total if on_card else one.self_cpu_time_total) / turns
        if taken > 0 and (not on_card or one.device_type == torch.autograd.DeviceType.CUDA):
            rows.append((taken, one.count / turns, one.key[:90]))
    rows.sort(reverse=True)
    total, num_kernels = sum(row[0] for row in rows), sum(row[1] for row in rows)
    way = (
        ("compiled, " + ("unpacked" if args.unpacked else "packed"))
        if args.compiled
        else "not compiled"
    )
    way += ", a graph replayed" if buffers.engine.graphs else ", not in a graph"
    print(f"\n{args.profile}, {num_rows} rows of {args.length} tokens, {way}: "
          f"{1000 * alone:.2f} ms a step, {total / 1000:.2f} ms of them in {num_kernels:.0f} kernels")  # fmt: skip
    listed = [
        [name, f"{count:g}", f"{taken:.1f}", f"{taken / count:.1f}"]
        for taken, count, name in rows[:30]
    ]
    print(shapes.table(["kernel", "a step", "microseconds", "each"], listed), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="3B,0.5B", help="of products; commas between")
    parser.add_argument("--rows", default="8,16,32,64,128", help="of products")
    parser.add_argument("--draws", default="8,64,256,1024", help="rows of draws")
    parser.add_argument(
        "--attention", choices=shapes.SHAPES, help="of this shape, and nothing else"
    )
    parser.add_argument(
        "--contexts", default=CONTEXTS, help="of attention: rows:tokens, commas between"
    )
    parser.add_argument(
        "--ways", default=WAYS, help="of attention: programs:splits:warps:stages, commas between"
    )
    parser.add_argument("--profile", choices=shapes.SHAPES, help="of this shape, and nothing else")
    parser.add_argument("--profile-rows", default="8,64")
    parser.add_argument("--compiled", action="store_true", help="layers of the profile")
    parser.add_argument(
        "--unpacked", action="store_true", help="each product of compiled layers by itself"
    )
    parser.add_argument(
        "--length", type=int, default=500, help="tokens behind each row of the profile"
    )
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.profile:
        profile(args, device)
        return
    rate = shapes.copy_rate(device)
    print(f"copies: {rate / 1e12:.2f} TB/s", flush=True)
    if args.attention:
        print(attention_table(args, device, rate))
        return
    print(draw_table(args, device, rate), flush=True)
    for shape in args.shapes.split(","):
        print(product_table(shape, args, device, rate), flush=True)


if __name__ == "__main__":
    main()
