"""A daemon that cannot begin because of a fault of the machine waits, as it does later: a machine that was just started may lack a disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from factory.core.errors import ConfigError, FactoryError, InputError
from factory.core.faults import fault_of, is_of_no_file
from factory.retrying.backoff import Backoff
from factory.retrying.steady import FAULT_SECONDS, words_of

T = TypeVar("T")
FIRST_SECONDS = 1.0


def patiently(act: Callable[[], T], say: Callable[[str], object]) -> T:
    """``act()``, again and again while a fault of the machine makes it fail. Each fault is said once.

    Raises: whatever else ``act`` does; ConfigError and InputError, too, where what is set caused the fault: a port that only root may listen
    on, and not where no setting can, as when factory.yaml cannot be read because no file handle is left.
    """
    waits = Backoff(FIRST_SECONDS, FAULT_SECONDS)
    while True:
        try:
            return act()
        except Exception as error:
            fault = fault_of(error)
            mistake = isinstance(error, ConfigError | InputError) and not is_of_no_file(error)
            if fault is None or mistake:
                raise
            rest, news = waits.failed("start", fault.says)
            if news:
                if isinstance(error, FactoryError):  # it knows more: which server, say
                    say(f"  {error}")
                say(f"  {words_of(fault)}")
        time.sleep(rest.seconds)
