"""A worker that does what `SCRIPT` (JSON in the environment) says for its array index and attempt: one list of steps per
index, one step per attempt. A step is an exit code, `"wait"` (until SIGTERM, then exit 75), a signal's name, or the path of a
fifo: the worker ends well once somebody has opened and closed that.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    index = os.environ.get("AWS_BATCH_JOB_ARRAY_INDEX")
    attempt = int(os.environ["AWS_BATCH_JOB_ATTEMPT"])
    seen = {name: value for name, value in os.environ.items() if name.startswith("AWS_BATCH_")}
    trace = Path(os.environ["TRACE"]) / f"{index or 'plain'}-{attempt}.json"
    trace.write_text(json.dumps({"variables": seen, "arguments": sys.argv[1:]}))
    step = json.loads(os.environ["SCRIPT"]).get(index or "plain", [0])[attempt - 1]
    print(json.dumps({"event": "partition.progress", "done_count": 1, "record_count": 2}), flush=True)
    if step == "wait":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        print(json.dumps({"event": "waiting"}), flush=True)
        signal.pause()
    elif isinstance(step, str) and "/" in step:
        Path(step).read_bytes()
    elif isinstance(step, str):
        os.kill(os.getpid(), signal.Signals[step])
    elif step:
        print("not an event")
        print(json.dumps({"event": "worker.failed", "message": f"step {step}"}), flush=True)
        sys.exit(step)


if __name__ == "__main__":
    main()
