"""Times the parts of a decode step with few rows: matrix products, attention and token sampling.

    python benchmarks/few_rows.py  # products of two shapes, and token sampling
    python benchmarks/few_rows.py --attention 3B  # attention, by how it is split among programs
    python benchmarks/few_rows.py --profile 3B --compiled [--unfused]  # kernels of one decode step

Each time is compared with the time to read the same bytes at the measured copy rate: a cell shows
microseconds and the share of that rate. Products run in CUDA graphs, each over several copies of
its weights, which together do not fit into the GPU's cache. `q+k+v` and `gate+up` are fused
products, as compiled layers of the engine compute them (`rollout/fused_linear.py`). `--unfused`
profiles compiled layers without them.
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
from eepo.model.lm_head import matmul_fp32
from eepo.rollout.fused_linear import compile_fused
from eepo.rollout.paged.cuda_graphs import BufferSizes, DecodeBuffers
from eepo.rollout.paged.scheduler import PAGE_SIZE, STEPS_AHEAD

COPY_BYTES = 256 << 20  # of all copies of a matrix: five times the cache of an H200
MAX_COPIES = 96
NO_LIMIT = 1 << 40  # tokens
# Rows and context lengths, as they occur with long-tailed completion lengths.
CONTEXTS = "8:1800,16:1200,32:900,64:700,128:600,256:450,512:320,1024:200,1024:380"
SPLITS = (
    "256:16:4:3,512:16:4:3,1024:16:4:3,2048:16:4:3,1024:32:4:3,"
    "1024:16:2:3,1024:16:8:3,1024:16:4:2,1024:16:4:4,1024:16:4:5"
)


@dataclass(frozen=True)
class Product:
    """One matrix product of a decode step: rows [N, inputs] times weights [inputs, outputs]."""

    name: str
    num_outputs: int
    num_inputs: int
    bias: bool = False
    per_step: int = 1  # how often a step computes it without fusion
    per_fused_step: int = 1  # how often a step computes it with fusion

    def num_bytes(self, num_rows: int) -> int:
        """Return the bytes that are read and written, in bf16; logits are fp32."""
        num_results = num_rows * self.num_outputs
        moved = self.num_outputs * self.num_inputs + num_rows * self.num_inputs + num_results
        return 2 * moved + (2 * num_results if self.name == "head" else 0)


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


def median_microseconds(
    calls: Sequence[Callable[[], Any]], device: torch.device, before: Callable[[], Any]
) -> float:
    """Return the time of one call, if all `calls` run in one CUDA graph.

    Takes the median of a few replays. `before` runs before each of them.
    """

    def run_all() -> None:
        for call in calls:
            call()

    calls[0]()  # compiles
    replay: Callable[[], Any] = run_all
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_all()
        replay = graph.replay
    seconds = []
    for _ in range(5):
        before()
        seconds.append(_seconds(replay, device))
    return 1e6 * statistics.median(seconds[1:]) / len(calls)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Time one call, with CUDA events on a GPU."""
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def _num_copies(num_bytes: int, device: torch.device) -> int:
    """Return how many copies of `num_bytes` each exceed the GPU's cache."""
    return max(2, min(MAX_COPIES, -(-COPY_BYTES // num_bytes))) if device.type == "cuda" else 1


def _cell(microseconds: float, num_bytes: int, rate: float) -> str:
    share = num_bytes / rate / (microseconds * 1e-6)
    return f"{microseconds:.1f} ({100 * share:.0f} %)"


# --- matrix products


def product_table(shape: str, args: argparse.Namespace, device: torch.device, rate: float) -> str:
    rows, times = [], {}
    for product in products_of(shape):
        matrices, bias = _weights(product, device)
        for num_rows in map(int, args.rows.split(",")):
            taken = _time_product(product, num_rows, matrices, bias, device)
            times[product, num_rows] = taken
            cell = _cell(taken, product.num_bytes(num_rows), rate)
            rows.append([product.name, num_rows, cell])
        del matrices
    table = shapes.table(["product", "rows", "torch"], rows)
    title = f"\n{shape}, microseconds (share of the copy rate)"
    return f"{title}\n{table}\n\n{_step_table(shape, times, args)}"


def _step_table(shape: str, times: dict[Any, float], args: argparse.Namespace) -> str:
    """Add up all products of a decode step, without and with fusion."""
    rows = []
    for num_rows in map(int, args.rows.split(",")):
        products = products_of(shape)
        unfused = sum(times[p, num_rows] * p.per_step for p in products)
        fused = sum(times[p, num_rows] * p.per_fused_step for p in products)
        rows.append([num_rows, f"{unfused / 1000:.2f}", f"{fused / 1000:.2f}"])
    table = shapes.table(["rows", "unfused", "fused"], rows)
    return f"{shape}, ms per step, products only\n{table}"


def _weights(product: Product, device: torch.device) -> tuple[list[Tensor], Tensor | None]:
    """Return copies of random weights. With zeros a GPU draws less power and is faster."""
    size = product.num_outputs, product.num_inputs
    number = _num_copies(2 * product.num_outputs * product.num_inputs, device)
    matrices = [torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(number)]
    bias = torch.randn(size[0], device=device, dtype=torch.bfloat16)
    return matrices, bias if product.bias else None


def _time_product(
    product: Product,
    num_rows: int,
    matrices: list[Tensor],
    bias: Tensor | None,
    device: torch.device,
) -> float:
    x = torch.randn(num_rows, product.num_inputs, device=device, dtype=torch.bfloat16)
    multiply = matmul_fp32 if product.name == "head" else partial(linear, bias=bias)
    calls = [partial(multiply, x, matrix) for matrix in matrices]
    return median_microseconds(calls, device, lambda: None)


# --- attention


def attention_table(args: argparse.Namespace, device: torch.device, rate: float) -> str:
    """Compare splits, one column each: minimal programs, maximal splits of a row, warps, stages."""
    all_splits = [tuple(map(int, splits.split(":"))) for splits in args.splits.split(",")]
    lines = []
    for case in args.contexts.split(","):
        num_rows, length = map(int, case.split(":"))
        inputs, num_bytes = _attention_inputs(args.attention, num_rows, length, device)
        times = [_time_attention(inputs, splits, device) for splits in all_splits]
        lines.append([num_rows, length, *(_cell(taken, num_bytes, rate) for taken in times)])
    head = ["rows", "tokens", *args.splits.split(",")]
    title = f"attention of one layer, {args.attention}, microseconds (share of the copy rate)"
    return f"\n{title}\n{shapes.table(head, lines)}"


def _attention_inputs(
    shape: str, num_rows: int, length: int, device: torch.device
) -> tuple[list[tuple[Tensor, ...]], int]:
    """Return inputs of more layers than the GPU cache holds, and the bytes that a layer reads."""
    config = shapes.config(shape)
    size, heads = config.hidden_size // config.num_attention_heads, config.num_key_value_heads
    width = length // PAGE_SIZE + 1
    num_bytes = 2 * 2 * num_rows * length * heads * size
    page_tables = torch.randperm(num_rows * width, device=device).view(num_rows, width).int()
    positions = torch.full((num_rows,), length, device=device)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, dtype=torch.bfloat16)

    query = random(num_rows, config.num_attention_heads, size)
    new = [random(num_rows, heads, size) for _ in range(2)]
    layers = [
        [random(num_rows * width, heads, PAGE_SIZE, size) for _ in range(2)]
        for _ in range(_num_copies(num_bytes, device))
    ]
    return [(query, *new, *pages, page_tables, positions) for pages in layers], num_bytes


def _time_attention(
    inputs: list[tuple[Tensor, ...]], splits: tuple[int, ...], device: torch.device
) -> float:
    attention = kernels.select("paged_attention", device)
    if device.type == "cuda":
        from eepo.kernels import paged_attention as module

        module.PROGRAMS, module.MAX_SPLITS, module.WARPS, module.STAGES = splits
    calls = [partial(attention, *layer, 0.1) for layer in inputs]
    return median_microseconds(calls, device, lambda: None)


# --- token sampling


def sampling_table(args: argparse.Namespace, device: torch.device, rate: float) -> str:
    lines = []
    for num_rows in map(int, args.sampling_rows.split(",")):
        taken = _time_sampling(num_rows, device)
        lines.append([num_rows, _cell(taken, num_rows * shapes.VOCABULARY * 4, rate)])
    table = shapes.table(["rows", "sampling"], lines)
    return f"\ntoken sampling, microseconds (share of the copy rate)\n{table}"


def _time_sampling(num_rows: int, device: torch.device, repeats: int = 20) -> float:
    sample_tokens = kernels.select("sample_tokens", device)
    state, outputs = RowState.empty(num_rows, device), _outputs(num_rows, repeats + 1, device)
    slots, inverse_temperature = torch.arange(num_rows, device=device), torch.ones(1, device=device)
    state.outputs.copy_(slots)
    state.keys.copy_(slots * 7919)
    state.limits.fill_(NO_LIMIT)
    state.live.fill_(1)
    num_copies = max(2, min(repeats, -(-COPY_BYTES // (num_rows * shapes.VOCABULARY * 4))))
    logits = [
        3 * torch.randn(num_rows, shapes.VOCABULARY, device=device) for _ in range(num_copies)
    ]
    end_tokens = torch.full((1,), -1, device=device)
    options = slots, slots, inverse_temperature, end_tokens, state, outputs
    calls = [
        partial(sample_tokens, logits[turn % num_copies], *options)
        for turn in range(repeats if device.type == "cuda" else 1)
    ]
    return median_microseconds(calls, device, state.num_sampled.zero_)


def _outputs(num_rows: int, width: int, device: torch.device) -> Outputs:
    matrices = [
        torch.zeros(num_rows, width, dtype=dtype, device=device)
        for dtype in (torch.int32, torch.float32, torch.float32)
    ]
    return Outputs(*matrices, *torch.zeros(2, num_rows, dtype=torch.int32, device=device))


# --- a decode step of the engine


def profile(args: argparse.Namespace, device: torch.device) -> None:
    """Profile decode steps of rows that have `--length` tokens behind them."""
    num_rows = [int(number) for number in args.profile_rows.split(",")]
    num_slots = max(num_rows)
    model = shapes.new_model(args.profile, torch.bfloat16, device)
    engine = shapes.FixedLengthEngine(model, num_slots, {})
    if reason := engine.unsupported_reason():
        raise SystemExit(f"the paged engine does not support this model here: {reason}")
    if args.compiled:
        (compile_layers if args.unfused else compile_fused)(engine.model)
    width = -(-(args.length + STEPS_AHEAD) // PAGE_SIZE) + 2
    sizes = BufferSizes(num_slots, args.length + PAGE_SIZE, num_slots, PAGE_SIZE)
    num_pages = num_slots * width + 1
    kept = num_pages * engine.cache.page_bytes <= engine.keep_bytes
    buffers = DecodeBuffers(engine.cache, engine.end_tokens, engine.graphs, sizes, num_pages, kept)
    buffers.reset(1.0)
    pages = 1 + torch.arange(num_slots * width, device=device)
    buffers.page_tables[:, :width] = pages.view(num_slots, width).int()
    for number in num_rows:
        _set_state(buffers, args.length)
        with torch.inference_mode():
            buffers.step(number)  # captures a graph
            buffers._graphs.clear()
            buffers._graph_memory = None  # it was freed with the graphs
            seconds = _seconds(partial(buffers.step, number), device)  # as in later calls
            _set_state(buffers, args.length)
            print(f"\ncaptured again and run in {1000 * seconds:.0f} ms")
            _print_kernels(buffers, number, args, device)


def _set_state(buffers: DecodeBuffers, length: int) -> None:
    """Put a live row with `length` cached tokens into every slot."""
    state = buffers.state
    state.positions.fill_(length)
    state.num_sampled.zero_()
    state.limits.fill_(NO_LIMIT)
    state.outputs.copy_(buffers.all_slots)
    state.live.fill_(1)


def _step_seconds(step: Callable[[], Any], device: torch.device, num_steps: int = 8) -> float:
    """Time one of several queued steps. As in the engine, the GPU does not wait for the host."""

    def several() -> None:
        for _ in range(num_steps):
            step()

    return _seconds(several, device) / num_steps


def _print_kernels(
    buffers: DecodeBuffers, num_rows: int, args: argparse.Namespace, device: torch.device
) -> None:
    num_steps, on_gpu = 4, device.type == "cuda"
    step = partial(buffers.step, num_rows)
    seconds = statistics.median(_step_seconds(step, device) for _ in range(num_steps))
    with torch.profiler.profile() as profiler:
        for _ in range(num_steps):
            step()
        shapes.synchronize(device)
    rows = []
    for event in profiler.key_averages():
        total = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if total > 0 and (not on_gpu or event.device_type == torch.autograd.DeviceType.CUDA):
            rows.append((total / num_steps, event.count / num_steps, event.key[:90]))
    rows.sort(reverse=True)
    total, num_kernels = sum(row[0] for row in rows), sum(row[1] for row in rows)
    fusion = "unfused" if args.unfused else "fused"
    mode = f"compiled, {fusion}" if args.compiled else "not compiled"
    mode += ", in a CUDA graph" if buffers.graphs.enabled else ", without a CUDA graph"
    print(
        f"\n{args.profile}, {num_rows} rows of {args.length} tokens, {mode}: "
        f"{1000 * seconds:.2f} ms per step, {total / 1000:.2f} ms in {num_kernels:.0f} kernels"
    )
    lines = [
        [name, f"{count:g}", f"{taken:.1f}", f"{taken / count:.1f}"]
        for taken, count, name in rows[:30]
    ]
    print(shapes.table(["kernel", "per step", "microseconds", "each"], lines), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", default="3B,0.5B", help="model shapes of the products, comma-separated")
    add("--rows", default="8,16,32,64,128", help="rows of the products")
    add("--sampling-rows", default="8,64,256,1024", help="rows of token sampling")
    add("--attention", choices=shapes.SHAPES, help="time attention of this shape only")
    add("--contexts", default=CONTEXTS, help="attention: rows:tokens, comma-separated")
    add("--splits", default=SPLITS, help="attention: programs:splits:warps:stages, comma-separated")
    add("--profile", choices=shapes.SHAPES, help="profile a decode step of this shape only")
    add("--profile-rows", default="8,64", help="rows of the profiled steps")
    add("--length", type=int, default=500, help="cached tokens per row of the profiled steps")
    add("--compiled", action="store_true", help="compile the layers of the profiled model")
    add("--unfused", action="store_true", help="compile without fused products")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.profile:
        profile(args, device)
        return
    rate = shapes.copy_rate(device)
    print(f"copies: {rate / 1e12:.2f} TB/s", flush=True)
    if args.attention:
        print(attention_table(args, device, rate))
        return
    print(sampling_table(args, device, rate), flush=True)
    for shape in args.shapes.split(","):
        print(product_table(shape, args, device, rate), flush=True)


if __name__ == "__main__":
    main()
