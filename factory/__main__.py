"""``python -m factory``, in whatever folder: its code comes from its own checkout."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType


def end(number: int, frame: FrameType | None) -> None:
    """While the command line is still imported nothing was started, and nothing has to end in order."""
    os.write(2, b"factory: stopped; run the same command again to go on\n")
    os._exit(128 + number)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    if not sys.flags.safe_path:  # Python puts the current folder first, which may be a checkout that agents patch
        del sys.path[0]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from factory import cli

    cli.main()


if __name__ == "__main__":
    main()
