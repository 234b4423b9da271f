"""OUT/SUITE.json: the cases of a suite as they were measured, each with its stamp."""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from normattn.atomic import explain_os_errors, write_json
from normattn.bench.attending import KernelAlone, Scored
from normattn.bench.case import Case, Suite
from normattn.bench.judge import judge, roofline, why_missed
from normattn.bench.machine import provenance
from normattn.bench.measure import Measurement
from normattn.bench.settings import Settings
from normattn.errors import InputError
from normattn.structured import read_object

Row = dict[str, Any]
_APART = ("quick", "threads", "device")


@dataclass(frozen=True)
class Record:
    """The file of one suite; a row is used again when its case, settings and stamp are the same.

    The stamp holds machine, versions and a digest of the source that is measured, so that a row
    of other code is measured again.
    """

    path: Path
    suite: Suite
    settings: Settings

    def rows(self) -> list[Row]:
        """What is on record; none where there is no file.

        Raises `InputError` for a file that is damaged or of other threads, device or kind.
        """
        if not self.path.exists():
            return []
        rows = read_object(self.path).get("rows")
        if not isinstance(rows, list) or not all(_whole(row) for row in rows):
            raise InputError(f"{self.path} is damaged: it holds no rows of a benchmark")
        for row in rows:
            self._refuse_others(row["settings"])
        return rows

    def _refuse_others(self, stored: Row) -> None:
        """One folder holds rows of one kind: they would replace each other under one name."""
        mine = self.settings.summary()
        other = [f"{name} {stored[name]}" for name in _APART if stored[name] != mine[name]]
        if other:
            asked = [f"{name} {mine[name]}" for name in _APART if stored[name] != mine[name]]
            raise InputError(
                f"{self.path} holds rows of {', '.join(other)}, and {', '.join(asked)} was asked "
                "for; choose another --out"
            )

    def find(self, case: Case) -> Row | None:
        """The row of this very case, settings and stamp, or None."""
        key, stamp = self._key(case), self._stamp()
        same = (row for row in self.rows() if row["key"] == key and row["stamp"] == stamp)
        return next(same, None)

    def add(self, case: Case, measurement: Measurement, profiles: Row | None = None) -> Row:
        """Put a measured case in place of its row, or behind all others; the file is whole."""
        row = self._row(case, measurement, profiles or {})
        rows = self.rows()
        places = [i for i, old in enumerate(rows) if old["case"] == case.name]
        if places:
            rows[places[0]] = row
        else:
            rows.append(row)
        write_json(self.path, {"suite": self.suite.name, "what": self.suite.summary, "rows": rows})
        return row

    def _row(self, case: Case, measurement: Measurement, profiles: Row) -> Row:
        lines = roofline(case, measurement)
        verdicts = judge(case, measurement, claims=not self.settings.quick)
        return {
            "case": case.name,
            "key": self._key(case),
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            "stamp": self._stamp(),
            "settings": self.settings.summary(),
            "goals": [
                {**asdict(verdict), "why": why_missed(verdict, lines, measurement)}
                for verdict in verdicts
            ],
            **measurement.summary(),
            "kernels": kernels(case),
            "roofline": lines,
            "profiles": profiles,
        }

    def _key(self, case: Case) -> str:
        values = ",".join(f"{name}={value}" for name, value in self.settings.summary().items())
        return f"{case.digest}:{values}"

    def _stamp(self) -> Row:
        packages = ("torch", "normattn", *self.suite.packages)
        return provenance(packages, self.settings.threads, self.settings.device)


def kernels(case: Case) -> dict[str, str]:
    """The kernel that each of our entries ran, where the dispatcher chose one."""
    ours = (Scored, KernelAlone)
    return {name: e.kernel() for name, e in case.entries.items() if isinstance(e, ours)}


def _whole(row: Any) -> bool:
    wanted = {"case", "key", "date", "stamp", "settings", "goals", "seconds", "machine", "kernels"}
    return isinstance(row, dict) and wanted <= set(row)


def check_out(out: Path) -> None:
    """Raise `InputError` unless records can be written into `out`; makes the folder."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; it must be a folder")
    with explain_os_errors(out):
        out.mkdir(parents=True, exist_ok=True)
