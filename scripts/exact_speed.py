"""Times exact conversions against a plain copy of the same bytes.

usage: exact_speed.py REQUANT CHECKPOINT WORK [--limit BYTES]

Best of five each, source warm, each with a final sync; WORK is a folder on the file system of CHECKPOINT. With
--limit, each conversion (and one to EXL2) runs once in that much data memory (RLIMIT_DATA) and its peak of
anonymous memory is told instead.
"""

import pathlib
import resource
import shutil
import subprocess
import sys
import threading
import time

requant, source, work = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
limit = int(sys.argv[5]) if len(sys.argv) > 5 else None
out = work / "out"
CONVERT = [requant, "convert", str(source), "--out", str(out), "--to"]
JOBS = {
    "gptq --zeros v2": [*CONVERT, "gptq", "--zeros", "v2"],
    "same --shard-size 1GB": [*CONVERT, "same", "--shard-size", "1GB"],
}


def timed(command):
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run(["sync"], check=True)
    started = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    subprocess.run(["sync"], check=True)
    return time.monotonic() - started


def limited(command):
    """The largest sum of private anonymous pages, and the time."""
    shutil.rmtree(out, ignore_errors=True)
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)))
    peak = 0

    def watch():
        nonlocal peak
        while process.poll() is None:
            try:
                status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                return
            for line in status.splitlines():
                if line.startswith("RssAnon:"):
                    peak = max(peak, int(line.split()[1]) * 1024)
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    errors = process.stderr.read().decode()
    watcher.join()
    return process.wait(), peak, time.monotonic() - started, errors


size = sum(file.stat().st_size for file in source.iterdir())
if limit:
    for name, command in {**JOBS, "exl2 --bits 4": [*CONVERT, "exl2", "--bits", "4"]}.items():
        code, peak, seconds, errors = limited(command)
        print(f"{name:24} exit {code}, {peak / 2**20:.0f} MiB anonymous at most, {seconds:.0f} s, {size / 1e9:.2f} GB")
        if code:
            print(errors[-500:])
else:
    subprocess.run(f"cat {source}/* > /dev/null", shell=True, check=True)
    copies = [["cp", "-r", "--reflink=never", str(source), str(out)]] * 5
    copy = min(timed(command) for command in copies)
    print(f"{'cp --reflink=never':24} {copy:.2f} s, {size / copy / 1e9:.2f} GB/s")
    for name, command in JOBS.items():
        best = min(timed(command) for _ in range(5))
        print(f"{name:24} {best:.2f} s, {size / best / 1e9:.2f} GB/s, {copy / best:.2f} of cp")
shutil.rmtree(out, ignore_errors=True)
