"""``cephalo report``: one HTML file about a run, without outside resources."""

from lightning_cephalo.offline.run_report.folder import RunFolder
from lightning_cephalo.offline.run_report.page import page

__all__ = ["RunFolder", "page"]
