"""Telling Kubernetes that ranks were given back or are wanted again: the size of an indexed Job or a StatefulSet.

Kubernetes cannot take a GPU away from a running pod; it can end pods. Both an elastic indexed Job (parallelism and
completions change together) and a StatefulSet end the pods with the highest numbers first and start them again in
order, so a member's number here is its pod's index, and only the highest members can be given back. Needs the official
client (`pip install kubernetes`).
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any, Literal

from prophet.errors import SpecError

Kind = Literal["job", "statefulset"]


class ScaleError(RuntimeError):
    """Kubernetes did not do what it was asked; the message names the object and what it answered."""


class KubernetesScaler:
    """Changes the number of pods of one Job or StatefulSet.

    Hand `release` to `pipeline_balance.release.membership.released` as `on_release`.

    >>> scaler = KubernetesScaler("train", namespace="ml")               # doctest: +SKIP
    >>> released(membership, pipeline, on_release=scaler.release)        # doctest: +SKIP

    Args:
        name: Of the object.
        namespace: Where it is.
        kind: "job" for an elastic indexed Job, or "statefulset".
        api_client: A `kubernetes.client.ApiClient`; None takes the pod's service account, else the user's kubeconfig.
        timeout_s: Seconds that every request may take.

    Raises:
        ScaleError: Where the official client is not installed.
    """

    def __init__(
        self,
        name: str,
        *,
        namespace: str = "default",
        kind: Kind = "job",
        api_client: Any = None,
        timeout_s: float = 30.0,
    ) -> None:
        if kind not in ("job", "statefulset"):
            raise SpecError(f"kind must be 'job' or 'statefulset', got {kind!r}")
        if not name or not timeout_s > 0:
            raise SpecError(f"need a name and a positive timeout_s, got {name!r} and {timeout_s!r}")
        self.name, self.namespace, self.kind, self.timeout_s = name, namespace, kind, timeout_s
        try:
            # by name: whether these functions have types differs with the client's version
            client: Any = importlib.import_module("kubernetes.client")
            config: Any = importlib.import_module("kubernetes.config")
        except ImportError as error:
            raise ScaleError("scaling needs the official client: pip install kubernetes") from error
        self._client = client
        if api_client is None:
            try:
                # inside a pod; on a laptop there is no service account
                config.load_incluster_config()
            except config.ConfigException:
                config.load_kube_config()
        api = client.BatchV1Api if kind == "job" else client.AppsV1Api
        self._api = api(api_client)

    @property
    def where(self) -> str:
        """The object as messages name it."""
        return f"{self.kind} {self.namespace}/{self.name}"

    def size(self) -> int:
        """How many pods are wanted now."""
        spec = self._read().spec
        wanted = spec.parallelism if self.kind == "job" else spec.replicas
        # the API leaves a default of 1 out
        return 1 if wanted is None else int(wanted)

    def running(self) -> int:
        """How many pods are ready."""
        status = self._read().status
        ready = status.ready if self.kind == "job" else status.ready_replicas
        return int(ready or 0)

    def scale(self, pods: int) -> None:
        """Ask for `pods` pods, at least one; returns at once. Raises `ScaleError` with the server's reason."""
        if pods < 1:
            raise SpecError(f"a {self.kind} cannot be scaled to {pods} pods: training needs at least one")
        if self.kind == "job":
            # only an indexed Job may change its completions while it runs
            completed = self._read().spec.completion_mode
            if completed != "Indexed":
                raise ScaleError(f"{self.where} must have completionMode Indexed to be resized, it has {completed!r}")
            self._call("patch_namespaced_job", {"spec": {"parallelism": pods, "completions": pods}})
        else:
            self._call("patch_namespaced_stateful_set", {"spec": {"replicas": pods}})

    def release(self, members: Sequence[int]) -> None:
        """Give the pods of these members back. They must be the highest ones, as Kubernetes ends those first."""
        size = self.size()
        expected = list(range(size - len(members), size))
        if sorted(members) != expected:
            raise SpecError(
                f"{self.where} has {size} pods and would end {expected}, not {sorted(members)}: "
                f"re-pack onto the lowest members"
            )
        self.scale(size - len(members))

    def wait_until(self, pods: int, *, timeout_s: float, poll_s: float = 1.0) -> None:
        """Return once so many pods are ready.

        Args:
            pods: How many.
            timeout_s: Seconds to wait.
            poll_s: Seconds between two looks.

        Raises:
            ScaleError: After `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while (found := self.running()) != pods:
            if time.monotonic() >= deadline:
                raise ScaleError(f"{self.where}: {found} of {pods} pods are ready after {timeout_s:g} s")
            # the last look is at the deadline, not after it
            time.sleep(min(poll_s, max(deadline - time.monotonic(), 0.0)))

    def _read(self) -> Any:
        return self._call("read_namespaced_job" if self.kind == "job" else "read_namespaced_stateful_set")

    def _call(self, method: str, *body: Any) -> Any:
        try:
            return getattr(self._api, method)(self.name, self.namespace, *body, _request_timeout=self.timeout_s)
        except self._client.ApiException as error:
            raise ScaleError(f"{self.where}: {method} was answered {error.status} {error.reason}") from error
        except OSError as error:
            raise ScaleError(f"{self.where}: {method}: {error}") from error
        except Exception as error:
            # the client lets its HTTP library's errors through
            if type(error).__module__.startswith("urllib3"):
                raise ScaleError(f"{self.where}: the server cannot be reached: {error}") from error
            raise
