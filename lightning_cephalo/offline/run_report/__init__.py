"""``cephalo report``: one HTML file about a run, without outside resources.

``folder.py`` reads a run's folder, ``lost_time.py`` finds what was lost where, ``findings.py`` says
it in sentences, ``drawing.py`` draws by matplotlib, and ``page.py`` fills ``page.html`` in.
"""

from lightning_cephalo.offline.run_report.folder import RunFolder
from lightning_cephalo.offline.run_report.page import page

__all__ = ["RunFolder", "page"]
