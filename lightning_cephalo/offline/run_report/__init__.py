"""``cephalo report``: one HTML file about a run, without outside resources."""

from lightning_cephalo.offline.run_report.page import page

__all__ = ["page"]
