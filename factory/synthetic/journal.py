"""The answers of a run so far: a file of JSON lines that is only appended to, so that a run that was killed goes on."""

from __future__ import annotations

import json
from pathlib import Path

from factory.synthetic.writers import Answer


class AnswerJournal:
    """Of the file ``path``, which is made where there is none. What a kill or a power cut left of a last line is cut off: that answer is
    asked for again. The file is not flushed to the disk after each answer: a power cut costs time alone."""

    def __init__(self, path: Path) -> None:
        self._places: dict[int, int] = {}
        self._file = open(path, "a+b")  # noqa: SIM115 - as long as the run
        self._file.seek(0)
        whole = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                number = int(row["number"])
                Answer(**{key: str(row[key]) for key in ("text", "end")})
            except (ValueError, KeyError, TypeError):
                break
            self._places[number] = whole
            whole += len(line)
        self._file.truncate(whole)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, number: int, answer: Answer) -> None:
        assert number not in self._places
        self._file.seek(0, 2)
        place = self._file.tell()
        row = {"number": number, "text": answer.text, "end": answer.end}
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self._places[number] = place

    def answer(self, number: int) -> Answer:
        self._file.seek(self._places[number])
        row = json.loads(self._file.readline())
        return Answer(row["text"], row["end"])

    def close(self) -> None:
        self._file.close()
