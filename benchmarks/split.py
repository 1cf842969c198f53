"""How fast inputs are split: both passes, writing and syncing included, against a bare loop of `orjson.loads`.

python benchmarks/split.py [--json]

The loop reads the same file's lines on one core and keeps nothing. Rounds take turns, so that whatever else the machine
does touches all alike; the median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from submitter.split import SplitRequest, split_run

WORDS = """
the of and to in is that it for on with as was at by be this from or an are not have but had which one you were all there
would their we him been has when who will no more if out so what up said about into than them can only other time new
some could these two may first then do any like my now over such our man me even most made after also did many must years
way well see how long little very house café résumé “quoted” 東京
""".split()  # noqa: SIM905  a list would be ninety lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    line_bytes: int
    line_count: int
    what: str
    cores: int
    median_s: float
    lines_per_s: float
    megabytes_per_s: float
    against_loop: float
    """Lines a second, as a multiple of the loop's."""


def write_lines(path: Path, line_bytes: int, total_bytes: int) -> int:
    """Chat requests in OpenAI's batch shape, of about that length."""
    rng = random.Random(line_bytes)
    texts = [" ".join(rng.choices(WORDS, k=2 * line_bytes // 5 + 50)) for _ in range(64)]
    count = written = 0
    with path.open("wb") as stream:
        while written < total_bytes:
            length = max(20, int(rng.gauss(line_bytes - 200, line_bytes / 5)))
            messages = [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": rng.choice(texts)[:length] + '\n"Why?"'},
            ]
            body = {"model": "m", "messages": messages, "max_tokens": rng.choice([64, 128, 256])}
            record = {"custom_id": f"request-{count}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            written += stream.write(orjson.dumps(record) + b"\n")
            count += 1
    return count


def loop(path: Path) -> None:
    with path.open("rb") as stream:
        for line in stream:
            orjson.loads(line)


def split(path: Path, run: Path, partition_count: int, process_count: int) -> None:
    shutil.rmtree(run, ignore_errors=True)
    request = SplitRequest(
        inputs=(str(path),),
        run_uri=str(run),
        partition_count=partition_count,
        model="m",
        process_count=process_count,
    )
    split_run(request)


def timed(work: Callable[[], None], cores: set[int]) -> float:
    os.sched_setaffinity(0, cores)
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(folder: Path, line_bytes: int, options: argparse.Namespace) -> list[Result]:
    path, run = folder / f"lines-{line_bytes}.jsonl", folder / "run"
    line_count = write_lines(path, line_bytes, options.megabytes << 20)
    cores = sorted(os.sched_getaffinity(0))
    works: dict[tuple[str, int], Callable[[], None]] = {
        ("orjson.loads loop", 1): lambda: loop(path),
        ("split", 1): lambda: split(path, run, options.partitions, 1),
    }
    if len(cores) > 1:
        works["split", 2] = lambda: split(path, run, options.partitions, 2)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in works}
    try:
        for _ in range(options.rounds):
            for key, work in works.items():
                times[key].append(timed(work, set(cores[-key[1] :])))
    finally:
        os.sched_setaffinity(0, cores)
        shutil.rmtree(run, ignore_errors=True)
    size = path.stat().st_size
    path.unlink()
    medians = {key: statistics.median(found) for key, found in times.items()}
    return [
        Result(
            line_bytes=size // line_count,
            line_count=line_count,
            what=what,
            cores=core_count,
            median_s=round(median, 3),
            lines_per_s=round(line_count / median),
            megabytes_per_s=round(size / median / 1e6),
            against_loop=round(medians["orjson.loads loop", 1] / median, 2),
        )
        for (what, core_count), median in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the input (default: 1024)")
    parser.add_argument("--partitions", type=int, default=100, help="(default: 100)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    parser.add_argument("--folder", help="where files are read and written (default: the temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="split-benchmark-") as folder:
        results = [result for size in (400, 4_000) for result in measure(Path(folder), size, options)]
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return
    print(f"{'bytes a line':>12} {'what':<18} {'cores':>5} {'s':>7} {'lines/s':>10} {'MB/s':>6} {'x loop':>7}")
    for one in results:
        print(
            f"{one.line_bytes:>12} {one.what:<18} {one.cores:>5} {one.median_s:>7.2f} {one.lines_per_s:>10,.0f} "
            f"{one.megabytes_per_s:>6} {one.against_loop:>7.2f}"
        )


if __name__ == "__main__":
    main()
