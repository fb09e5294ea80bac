"""Kernel speed on one GPU, against a device copy of the same number of bytes in the same run.

    python3 benchmarks/quantize_pack.py [--out benchmarks/results/NAME]

Needs a CUDA device with 32 GB free. The correctness gate comes first: if any byte is wrong, no speed is
printed. Every input is larger than the L2 cache and random. Bytes count reads plus writes, for the copy
as well; times are medians of `--repeat` runs between CUDA events. Writes NAME.json and NAME.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import time
from pathlib import Path

import torch
import triton
import triton.language as tl

from fp8bridge import kernels
from fp8bridge.kernels import reference, rules
from fp8bridge.kernels.triton_rules import BF16, apply_factor, bits_to_fp32, block_scale, magnitude_bits, to_e4m3

LLAMA_LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
QWEN3_LAYER = [(4096, 2048), (512, 2048), (512, 2048), (2048, 4096), *[(768, 2048), (768, 2048), (2048, 768)] * 128]
DEEPSEEK_LAYER = [
    (1536, 7168),
    (24576, 1536),
    (576, 7168),
    (32768, 512),
    (7168, 16384),
    *[(2048, 7168), (2048, 7168), (7168, 2048)] * 25,
]
# name: (matrices to quantize, plain copies), the checkpoints' shapes; layers per bucket chosen for ~2 GB out.
SHAPE_SETS = {
    "Qwen3-30B-A3B, 4 layers": (QWEN3_LAYER * 4, [(128, 2048), (1, 2048), (1, 2048), (1, 128), (1, 128)] * 4),
    "Llama-3.1-8B, 8 layers": (LLAMA_LAYER * 8, [(1, 4096), (1, 4096)] * 8),
    "DeepSeek-V3, 1 layer, 24 of 256 experts + shared": (DEEPSEEK_LAYER, [(256, 7168), (1, 7168), (1, 7168)]),
}
RULES = ("sglang", "te_pow2")
BY_ROW = "quantize_pack te_pow2, blocks of 1x128"


def times_ms(run, repeat):
    """Sorted times of `repeat` runs between CUDA events, after three to warm up."""
    for _ in range(3):
        run()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    for start, end in marks:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in marks)


def percentiles(values):
    """{p20, p50, p80} of a list."""
    cuts = statistics.quantiles(values, n=10)
    return {"p20": cuts[1], "p50": cuts[4], "p80": cuts[7]}


def make_bucket(quantized, copied, block=(128, 128)):
    """(items, sources on the GPU): scales first, then copies, then codes, without padding, as on the wire."""
    sources = [torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02) for shape in quantized]
    extras = [torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02) for shape in copied]
    items, offset = [], 0
    scale_offsets = []
    for rows, cols in quantized:
        scale_offsets.append(offset)
        grid_m, grid_k = rules.grid_shape(rows, cols, block)
        offset += 4 * grid_m * grid_k
    for rows, cols in copied:
        items.append(kernels.PackItem(rows, cols, "bfloat16", offset, None))
        offset += 2 * rows * cols
    for (rows, cols), scale_offset in zip(quantized, scale_offsets, strict=True):
        items.append(kernels.PackItem(rows, cols, "bfloat16", offset, scale_offset))
        offset += rows * cols
    return items, extras + sources


def aligned_bucket(items, nbytes):
    """A bucket whose base is moved so that the codes start on a multiple of 16, as fp8bridge does."""
    first_code = min(item.offset for item in items if item.scale_offset is not None)
    room = torch.empty(nbytes + 32, dtype=torch.uint8, device="cuda")
    shift = -(room.data_ptr() + first_code) % 16
    return room[shift : shift + nbytes]


def eager_quantize(weight, rule, block=(128, 128)):
    """One matrix with torch's own operations on the GPU; pads ragged edges."""
    rows, cols = weight.shape
    grid_m, grid_k = rules.grid_shape(rows, cols, block)
    x = torch.nn.functional.pad(weight.float(), (0, grid_k * 128 - cols, 0, grid_m * block[0] - rows))
    tiles = x.view(grid_m, block[0], grid_k, 128)
    factor, scale_inv = rules.block_scales(tiles.abs().amax((1, 3)), rule, weight.dtype)
    factor = factor[:, None, :, None]
    scaled = tiles / factor if rule == "sglang" else tiles * factor
    scaled = scaled.clamp_(-448, 448).view(grid_m * block[0], -1)[:rows, :cols]
    return scaled.to(torch.float8_e4m3fn), scale_inv


@triton.jit
def _one_tile(
    weight_ptr, codes_ptr, scales_ptr, rows, cols, RULE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    i_col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    inside = (i_row < rows) & (i_col < cols)
    x = tl.load(weight_ptr + i_row * cols + i_col, mask=inside, other=0.0)
    amax = bits_to_fp32(tl.max(magnitude_bits(x, BF16)), BF16)
    factor, scale_inv = block_scale(amax, RULE, BF16)
    q = apply_factor(x.to(tl.float32), factor, RULE, True)
    tl.store(codes_ptr + i_row * cols + i_col, to_e4m3(q, False), mask=inside)
    tl.store(scales_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), scale_inv)


def loop_quantize(weight, rule):
    """What every project does today: two allocations and one launch for each tensor."""
    grid = rules.grid_shape(*weight.shape, (128, 128))
    codes = torch.empty(weight.shape, dtype=torch.uint8, device="cuda")
    scale_inv = torch.empty(grid, dtype=torch.float32, device="cuda")
    _one_tile[grid](weight, codes, scale_inv, *weight.shape, RULE=rule, ROWS=128, COLS=128, num_warps=8)
    return codes, scale_inv


def check_matrices(items, sources, bucket, rule, block=(128, 128)):
    """Every item against torch eager on the GPU, and a corner of every shape against the naive reference."""
    seen = set()
    for item, source in zip(items, sources, strict=True):
        if item.scale_offset is None:
            written = bucket[item.offset : item.offset + 2 * item.rows * item.cols]
            assert torch.equal(written, source.view(-1).view(torch.uint8)), f"copied bytes differ: {item}"
            continue
        codes, scale_inv = eager_quantize(source, rule, block)
        written = bucket[item.offset : item.offset + item.rows * item.cols]
        assert torch.equal(written, codes.view(-1).view(torch.uint8)), f"codes differ: {item}"
        scales = bucket[item.scale_offset : item.scale_offset + 4 * scale_inv.numel()]
        assert torch.equal(scales, scale_inv.view(-1).view(torch.uint8)), f"scales differ: {item}"
        if source.shape not in seen:
            seen.add(source.shape)
            corner = slice(max(0, (item.rows - 1) // 128 * 128), None), slice(0, 256)
            naive_codes, naive_scales = reference.quantize(source[corner].cpu(), rule, block)
            assert torch.equal(codes[corner].cpu().view(torch.uint8), naive_codes.view(torch.uint8))
            assert torch.equal(scale_inv[-len(naive_scales) :, :2].cpu(), naive_scales)


def copy_times(nbytes, repeat):
    """A device copy of `nbytes` random bytes: the roof, measured in the same run."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return percentiles(times_ms(lambda: target.copy_(source), repeat))


def bench_set(quantized, copied, repeat):
    """All measurements of one shape set."""
    items, sources = make_bucket(quantized, copied)
    table = kernels.PackTable.build(items, rule=RULES[0], device="cuda")
    bucket = aligned_bucket(items, table.nbytes)
    read = sum(source.numel() * source.element_size() for source in sources)
    moved = read + table.nbytes
    result = {"tensors": len(items), "bytes": moved, "bucket_bytes": table.nbytes, "times_ms": {}}

    record = result["times_ms"]
    record["copy"] = copy_times(moved // 2, repeat)
    record["copy of the bucket"] = copy_times(table.nbytes, repeat)
    matrices = sources[len(copied) :]
    for rule in RULES:
        bound = kernels.PackTable.build(items, rule=rule, device="cuda").bind(sources)
        bucket.fill_(0xA5)
        assert not bool(bound.launch(bucket).any())
        check_matrices(items, sources, bucket, rule)
        record[f"quantize_pack {rule}"] = percentiles(times_ms(lambda b=bound: b.launch(bucket), repeat))
        record[f"per-tensor loop {rule}"] = percentiles(
            times_ms(lambda r=rule: [loop_quantize(weight, r) for weight in matrices], max(5, repeat // 5))
        )
        record[f"torch eager {rule}"] = percentiles(
            times_ms(lambda r=rule: [eager_quantize(weight, r) for weight in matrices], 3)
        )
    bench_receiver(items, bucket, record, repeat)
    nbytes, record[BY_ROW] = bench_by_row(quantized, copied, repeat)
    result["bytes_by_row"] = read + nbytes
    return result


def bench_by_row(quantized, copied, repeat):
    """(bucket bytes, times) of the same matrices in blocks of 1x128, with 128 times the scales."""
    items, sources = make_bucket(quantized, copied, (1, 128))
    table = kernels.PackTable.build(items, rule="te_pow2", block=(1, 128), device="cuda")
    bucket = aligned_bucket(items, table.nbytes)
    bound = table.bind(sources)
    bound.launch(bucket)
    check_matrices(items, sources, bucket, "te_pow2", (1, 128))
    return table.nbytes, percentiles(times_ms(lambda: bound.launch(bucket), repeat))


def bench_receiver(items, bucket, record, repeat):
    """checksum and unpack_scatter over the packed bucket; every third destination is a strided view."""
    spans = [(item.offset, item.rows * item.cols * (1 if item.scale_offset is not None else 2)) for item in items]
    table = kernels.ChecksumTable.build(spans, device="cuda")
    sums = kernels.checksum(table, bucket)
    smallest = min(range(len(spans)), key=lambda i: spans[i][1])
    for index in {0, smallest, len(spans) // 2, len(spans) - 1}:
        offset, nbytes = spans[index]
        on_cpu = kernels.ChecksumTable.build([(0, nbytes)], device="cpu")
        assert sums[index].item() == kernels.checksum(on_cpu, bucket[offset : offset + nbytes].cpu()).item()
    record["checksum"] = percentiles(times_ms(lambda: kernels.checksum(table, bucket), repeat))

    unpack_items, destinations = [], []
    for index, item in enumerate(items):
        wide = item.scale_offset is not None and index % 3 == 0
        cols = item.cols if item.scale_offset is not None else 2 * item.cols
        unpack_items.append(kernels.UnpackItem(item.rows, cols, "uint8", item.offset))
        room = torch.zeros(item.rows, 2 * cols if wide else cols, dtype=torch.uint8, device="cuda")
        destinations.append(room[:, cols:] if wide else room)
    bound = kernels.UnpackTable.build(unpack_items, device="cuda").bind(destinations)
    bound.launch(bucket)
    for item, out in zip(unpack_items, destinations, strict=True):
        assert torch.equal(out.reshape(-1), bucket[item.offset : item.offset + item.rows * item.cols])
    record["unpack_scatter"] = percentiles(times_ms(lambda: bound.launch(bucket), repeat))


def bench_host(tensors=2000):
    """Host microseconds for a bucket of `tensors` matrices: launch when bound, launch when checked, bind."""
    items, sources = make_bucket([(256, 512)] * tensors, [])
    table = kernels.PackTable.build(items, rule="te_pow2", device="cuda")
    bucket = aligned_bucket(items, table.nbytes)
    bound = table.bind(sources)
    calls = {
        "bound.launch(bucket)": lambda: bound.launch(bucket),
        "quantize_pack(table, sources, bucket)": lambda: kernels.quantize_pack(table, sources, bucket),
        "table.bind(sources)": lambda: table.bind(sources),
    }
    result = {}
    for name, call in calls.items():
        spent = []
        for _ in range(60):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            spent.append((time.perf_counter() - start) * 1e6)
        result[name] = percentiles(spent[10:])
    return result


def bandwidths(result):
    """{operation: (GB/s, ratio to the copy)}; the checksum reads once, the unpack reads and writes."""
    moved, record = result["bytes"], result["times_ms"]
    out_nbytes = result["bucket_bytes"]
    copy = moved / record["copy"]["p50"] / 1e6
    small_copy = 2 * out_nbytes / record["copy of the bucket"]["p50"] / 1e6
    rows = {"copy": (copy, 1.0)}
    for name, times in record.items():
        if name in ("copy", "copy of the bucket"):
            continue
        special = {"checksum": out_nbytes, "unpack_scatter": 2 * out_nbytes, BY_ROW: result["bytes_by_row"]}
        nbytes = special.get(name, moved)
        speed = nbytes / times["p50"] / 1e6
        rows[name] = (speed, speed / (small_copy if name in ("checksum", "unpack_scatter") else copy))
    return rows


def report(results):
    env = results["environment"]
    lines = [f"# quantize_pack on {env['gpu']}, {env['date']}", ""]
    lines.append(f"torch {env['torch']}, triton {env['triton']}, CUDA {env['cuda']}, driver {env['driver']}.")
    lines.append("Medians; bytes read plus bytes written; ratio to a device copy of as many bytes in the same run.")
    lines.append("`benchmarks/quantize_pack.py` checks every byte before it times; percentiles are in the JSON.")
    for name, result in results["sets"].items():
        lines += ["", f"## {name}: {result['tensors']} tensors, {result['bytes'] / 1e9:.2f} GB moved", ""]
        lines += ["| operation | ms | GB/s | of copy |", "|---|---|---|---|"]
        for operation, (speed, ratio) in bandwidths(result).items():
            ms = result["times_ms"][operation]["p50"]
            lines.append(f"| {operation} | {ms:.3f} | {speed:.0f} | {ratio:.2f} |")
    lines += ["", "## Host time for a bucket of 2,000 tensors", "", "| call | microseconds |", "|---|---|"]
    for name, spent in results["host_us"].items():
        lines.append(f"| `{name}` | {spent['p50']:.0f} |")
    return "\n".join(lines) + "\n"


def environment():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "driver": subprocess.check_output(query, text=True).strip(),
        "date": datetime.date.today().isoformat(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write NAME.json and NAME.md")
    parser.add_argument("--repeat", type=int, default=30)
    args = parser.parse_args()
    torch.manual_seed(0)
    results = {"environment": environment(), "sets": {}}
    for name, (quantized, copied) in SHAPE_SETS.items():
        results["sets"][name] = bench_set(quantized, copied, args.repeat)
        torch.cuda.empty_cache()
    results["host_us"] = bench_host()
    text = report(results)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
