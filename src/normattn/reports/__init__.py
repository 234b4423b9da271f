"""From evaluation records to tables, figures and findings; imports no torch.

Figures (`history`, `figures`) are imported where they are drawn: matplotlib is slow to import.
"""

from __future__ import annotations

from normattn.reports.bootstrap import Bootstrap
from normattn.reports.build import ReportPaths, build
from normattn.reports.claims import Claim, claim, paired_difference
from normattn.reports.metrics import METRICS, Estimate, Metric
from normattn.reports.records import AnyRecord, Record, parse_record, read_record, record_text
from normattn.reports.retrieval_record import RetrievalRecord
from normattn.reports.table import Divergence, Row, table_rows

__all__ = [
    "AnyRecord",
    "Bootstrap",
    "Claim",
    "Divergence",
    "Estimate",
    "METRICS",
    "Metric",
    "Record",
    "ReportPaths",
    "RetrievalRecord",
    "Row",
    "build",
    "claim",
    "paired_difference",
    "parse_record",
    "read_record",
    "record_text",
    "table_rows",
]
