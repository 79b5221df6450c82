"""``python -m trainer FOLDER``: run the segment that FOLDER/segment.json asks for. Also under torchrun.

Exit codes: 0 done · 2 the spec, recipe, data or a checkpoint is wrong · 74 the disk is full · 75 stopped by SIGTERM,
checkpoint written: start it again to go on.
"""

from __future__ import annotations

import errno
import sys
from pathlib import Path

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    from trainer.host_memory import keep_freed_memory

    keep_freed_memory()
    from kernels.registry import KernelError
    from trainer.errors import TrainerError
    from trainer.segment import Stopped, run_segment
    from trainer.token_shard import TokenShardError

    try:
        run_segment(Path(arguments[0]))
    except (TrainerError, TokenShardError, KernelError) as error:
        print(f"trainer: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, TrainerError) else 2
    except Stopped as stopped:
        print(f"trainer: {stopped}", file=sys.stderr)
        return 75
    except OSError as error:
        if error.errno not in FULL:
            raise
        where = error.filename or arguments[0]
        print(f"trainer: {error.strerror}: {where}; free some space and start again", file=sys.stderr)
        return 74
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
