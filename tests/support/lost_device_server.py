"""A server whose device fails on request, and checks of what follows."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import httpx

from tests.support.processes import alive, children, command
from tests.support.server import ROOT, ServerProcess, python_path
from tests.support.waiting import until

_PLANT = ROOT / "tests" / "support" / "lost_device"
_LONG = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}


class LostDeviceServer:
    """A running server; `lose` breaks its worker's device."""

    def __init__(self, folder: Path, *args: str) -> None:
        self._fault = folder / "fault"
        self.server = ServerProcess(
            *args,
            # Otherwise streams continue in the next worker, and may meet the fault there again.
            *("--max-resumes", "0"),
            PYTHONPATH=os.pathsep.join([str(_PLANT), python_path()]),
            PLANTED_FAULT=str(self._fault),
        )

    def worker(self) -> int:
        """Return the process id of the worker; 0 if there is none."""
        for pid in children(self.server.process.pid):
            if "scheduler" in command(pid):
                return pid
        return 0

    def answer(self) -> list[int]:
        """Return a short greedy output."""
        sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        body = {"input_ids": [5, 6, 7], "sampling_params": sampling}
        response = self.server.client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()["output_ids"]

    def lose(self, kind: str, num_streams: int = 4) -> float:
        """Break the device while streams run; return the seconds until the worker has ended.

        All streams must end, the affected ones with an error, and a new worker must serve.
        """
        before = self.answer()
        old = self.worker()
        started = threading.Semaphore(0)
        endings: list[str] = []

        def stream() -> None:
            body = {"input_ids": [1, 2, 3], "stream": True, "sampling_params": _LONG}
            url = f"{self.server.url}/generate"
            last, has_begun = "", False
            with httpx.stream("POST", url, json=body, timeout=120) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        last = line.removeprefix("data: ")
                    if not has_begun:
                        has_begun = True
                        started.release()
            endings.append(last)

        self.server.client.post("/slow_down", json={"forward_sleep_time": 0.02}).raise_for_status()
        threads = [threading.Thread(target=stream, daemon=True) for _ in range(num_streams)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert started.acquire(timeout=60)
        self._fault.write_text(kind)
        took_s = until(lambda: not alive(old), what=self.server)
        self._fault.unlink()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a client hangs"
        for ending in endings:
            error = json.loads(ending)["error"]
            assert "its device failed" in error["message"]
        self.server.wait_for_line("The device has failed, so the worker ends: ")
        until(lambda: self.server.client.get("/health").status_code == 200, 180, self.server)
        assert self.worker() not in (0, old)
        assert self.answer() == before
        return took_s
