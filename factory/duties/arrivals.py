"""What lies in the inbox: it is ingested before all else, as it is quick, and nothing that goes wrong later may keep data out.

Apart because a duty is one file, and one line of the table.
"""

from __future__ import annotations

from factory.duties.duty import Duty
from factory.ingest.inbox import arrived, take, tend

TEND_INBOX = Duty(
    "tend_inbox",
    "return to the inbox what may be readable by now, and say what waits there and why",
    due=lambda look: (look.settle,),
    do=tend,
    each="pass",
)
INGEST = Duty(
    "ingest", "ingest a file of the inbox", due=lambda look: arrived(look.plant, look.settle), do=take, recurs=True
)
