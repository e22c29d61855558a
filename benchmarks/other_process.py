"""Runs and times a contender in a separate process."""

from __future__ import annotations

import multiprocessing
import timeit
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import benchmark

from benchmarks.contenders import compiling, prepare

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from benchmarks.contenders import Contender, Settings, Workload


class OtherProcess:
    """A run in another process, which exits when the object is destroyed.

    Args:
        contender: The contender.
        workload: The workload, which must be picklable.
        settings: The settings of the benchmark.
    """

    def __init__(self, contender: Contender, workload: Workload, settings: Settings) -> None:
        # A fork would inherit locks and threads of torch.
        context = multiprocessing.get_context("spawn")
        self._connection, other_end = context.Pipe()
        arguments = other_end, contender, workload, settings, torch.get_num_threads()
        context.Process(target=_serve, args=arguments, daemon=True).start()
        other_end.close()  # so that ``recv`` raises an error if the process exits

    def __call__(self) -> torch.Tensor:
        """Runs the model once and returns its result as float32."""
        return torch.from_numpy(self._request(0))

    def timeit(self, number: int) -> float:
        """Returns the seconds of ``number`` runs, after one run that is not timed."""
        return float(self._request(number))

    def _request(self, number: int) -> Any:
        self._connection.send(number)
        response = self._connection.recv()
        if isinstance(response, str):
            raise RuntimeError(response)
        return response


def _serve(
    connection: Connection,
    contender: Contender,
    workload: Workload,
    settings: Settings,
    num_threads: int,
) -> None:
    """Serves requests until the connection is closed.

    A request is a number of runs. The response is their seconds, the result of the model for 0, or
    the message of an error.
    """
    torch.set_num_threads(num_threads)
    run: Any = None
    while True:
        try:
            number = connection.recv()
        except EOFError:
            return
        response: Any
        try:
            run = run or prepare(contender, workload, settings)
            if number:
                response = timeit.Timer(run, run, timer=benchmark.timer).timeit(number)
            else:
                with compiling(contender):
                    response = run().float().numpy()
        except Exception as error:  # noqa: BLE001
            response = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        connection.send(response)
