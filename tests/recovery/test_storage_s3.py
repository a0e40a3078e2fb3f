"""Steps in S3: a server of it runs on this machine, and counts what it gives."""

from __future__ import annotations

import threading

import pytest
import torch

from lightning_cephalo.common.errors import RecoveryError
from lightning_cephalo.recovery.storage import Storage
from lightning_cephalo.recovery.store import Piece, Slot

pytest.importorskip("s3fs", reason="steps are sent to S3 by s3fs")
moto = pytest.importorskip("moto.server", reason="moto's server stands for S3")
serving = pytest.importorskip("werkzeug.serving", reason="moto's server stands for S3")

RANKS, PIECE_BYTES = 3, 1 << 21


class Server:
    """S3 on this machine.

    Attributes:
        given: Bytes of the bodies that it has given.
        denies: Whether it denies every request.
    """

    def __init__(self):
        self.given, self.denies, self.methods = 0, False, []
        self._app = moto.DomainDispatcherApplication(moto.create_backend_app)
        self._server = serving.make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _answer(self, environ, start):
        self.methods.append(environ["REQUEST_METHOD"])
        if self.denies:
            start("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]
        for part in self._app(environ, start):
            self.given += len(part)
            yield part

    def stop(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(scope="module")
def server():
    import s3fs

    with pytest.MonkeyPatch.context() as patch:
        started = Server()
        for name, value in {
            "AWS_ENDPOINT_URL": started.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }.items():
            patch.setenv(name, value)
        patch.setattr(s3fs.S3FileSystem, "retries", 1)
        s3fs.S3FileSystem().mkdir("bucket")
        yield started
        started.stop()


def test_s3_gives_the_missing_rows_alone_and_says_when_it_denies(server, tmp_path):
    kept, piece = Storage("s3://bucket/run"), Piece(4, 0, 0, RANKS, 9)
    kept.check_writable()
    assert kept.committed() == []
    contents = []
    for rank in range(RANKS):
        slot = Slot(tmp_path / f"slot{rank}")
        slot.write(piece.of(rank), b"meta", [torch.randn(PIECE_BYTES // 4)])
        sizes, content = slot.content()
        contents.append((slot, content))
        kept.send(piece.of(rank), sizes, content)
    kept.commit(piece)

    before = server.given
    again = Storage("s3://bucket/run")
    (step,) = again.committed()
    whole = torch.empty(sum(step.sent[1].sizes[:2]), dtype=torch.uint8)
    again.read(step, 1, whole)
    assert torch.equal(whole, contents[1][1])
    assert whole.numel() <= server.given - before <= 1.05 * whole.numel()

    server.denies = True
    try:
        for call in (kept.committed, kept.check_writable, lambda: kept.commit(piece)):
            with pytest.raises(
                RecoveryError, match=r"storage='s3://bucket/run': .*(Forbidden|Deni)"
            ):
                call()
    finally:
        server.denies = False
    # no upload in parts: of a process that is killed they stay, unseen and paid for
    assert "POST" not in server.methods
    kept.remove()
    assert kept.committed() == [] and kept._steps() == []
    with pytest.raises(RecoveryError, match=r"storage='s3://nobody/run': writing to it.*NotFound"):
        Storage("s3://nobody/run").check_writable()
