"""The Kubernetes client against a server that speaks the API's HTTP: what is asked, and what is said when it fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pipeline_balance.release.kubernetes import KubernetesScaler, ScaleError
from prophet.errors import SpecError

client = pytest.importorskip("kubernetes.client", reason="the official Kubernetes client is not installed")

POD = {"metadata": {"labels": {"app": "train"}}, "spec": {"containers": [{"name": "train", "image": "train"}]}}
JOB = "/apis/batch/v1/namespaces/ml/jobs/train"
SET = "/apis/apps/v1/namespaces/ml/statefulsets/train"


class _Server(ThreadingHTTPServer):
    """Keeps objects by path, merges patches into them, and notes every request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, dict[str, Any]] = {
            JOB: {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": "train", "namespace": "ml"},
                "spec": {"parallelism": 4, "completions": 4, "completionMode": "Indexed", "template": POD},
                "status": {"active": 4, "ready": 4},
            },
            SET: {
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "metadata": {"name": "train", "namespace": "ml"},
                "spec": {
                    "replicas": 4,
                    "serviceName": "train",
                    "selector": {"matchLabels": {"app": "train"}},
                    "template": POD,
                },
                "status": {"replicas": 4, "readyReplicas": 4},
            },
        }
        self.requests: list[tuple[str, str, Any]] = []
        self.forbidden = False


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _serve(self, change: Any) -> None:
        path = self.path.split("?")[0]
        self.server.requests.append((self.command, path, change))
        if self.server.forbidden:
            self._answer(403, {"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403})
        elif path not in self.server.objects:
            self._answer(404, {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404})
        else:
            found = self.server.objects[path]
            if change is not None:
                found["spec"].update(change["spec"])
                pods = change["spec"].get("parallelism", change["spec"].get("replicas"))
                found["status"].update({"ready": pods, "readyReplicas": pods})
            self._answer(200, found)

    def do_GET(self) -> None:
        self._serve(None)

    def do_PATCH(self) -> None:
        self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def scaler(server: _Server, **options: Any) -> KubernetesScaler:
    configuration = client.Configuration(host=f"http://127.0.0.1:{server.server_port}")
    configuration.retries = False
    settings: dict[str, Any] = {"namespace": "ml", "api_client": client.ApiClient(configuration), "timeout_s": 5.0}
    return KubernetesScaler("train", **{**settings, **options})


@pytest.mark.parametrize(("kind", "path"), [("job", JOB), ("statefulset", SET)])
def test_members_are_given_back_and_called_again(server: _Server, kind: str, path: str) -> None:
    mine = scaler(server, kind=kind)
    assert (mine.size(), mine.running()) == (4, 4)
    mine.release([3, 2])
    assert mine.size() == 2
    mine.scale(4)
    mine.wait_until(4, timeout_s=2.0)
    patches = [change["spec"] for method, where, change in server.requests if method == "PATCH" and where == path]
    if kind == "job":
        assert patches == [{"parallelism": n, "completions": n} for n in (2, 4)]
    else:
        assert patches == [{"replicas": 2}, {"replicas": 4}]


def test_only_the_highest_members_can_go(server: _Server) -> None:
    with pytest.raises(SpecError, match=r"would end \[3\], not \[0\]"):
        scaler(server).release([0])
    with pytest.raises(SpecError, match="at least one"):
        scaler(server).scale(0)
    assert not [r for r in server.requests if r[0] == "PATCH"]


def test_a_job_without_numbers_is_refused(server: _Server) -> None:
    server.objects[JOB]["spec"]["completionMode"] = "NonIndexed"
    with pytest.raises(ScaleError, match="completionMode Indexed"):
        scaler(server).scale(2)


def test_what_the_server_answers_is_said(server: _Server) -> None:
    server.forbidden = True
    with pytest.raises(ScaleError, match="job ml/train: read_namespaced_job was answered 403"):
        scaler(server).size()
    server.forbidden = False
    with pytest.raises(ScaleError, match="404"):
        KubernetesScaler("other", namespace="ml", api_client=scaler(server)._api.api_client).size()
    server.objects[JOB]["status"]["ready"] = 3
    with pytest.raises(ScaleError, match="3 of 4 pods are ready"):
        scaler(server).wait_until(4, timeout_s=0.1, poll_s=0.05)


def test_a_server_that_is_gone_is_a_named_error() -> None:
    with _Server() as server:
        mine = scaler(server)
    with pytest.raises(ScaleError, match="job ml/train"):
        mine.size()


def test_settings_are_checked() -> None:
    with pytest.raises(SpecError, match="kind"):
        KubernetesScaler("train", kind="pod")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="timeout_s"):
        KubernetesScaler("train", timeout_s=0.0)
