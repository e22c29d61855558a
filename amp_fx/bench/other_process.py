"""A contender in a process of its own, which times the blocks that it is asked for."""

from __future__ import annotations

import multiprocessing
import pickle
import timeit
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import benchmark

from amp_fx.bench.contenders import compiling, prepare

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from amp_fx.bench.contenders import Contender, Workload
    from amp_fx.bench.settings import Settings


class OtherProcess:
    """A run in another process. It ends with the object.

    Args:
        contender: The contender.
        workload: Its inputs, and the model, which must be picklable.
        settings: The settings of the benchmark.
    """

    def __init__(self, contender: Contender, workload: Workload, settings: Settings) -> None:
        pickled = pickle.dumps((contender, workload, settings))
        # A new interpreter: a fork would inherit locks and threads of torch.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = theirs, pickled, torch.get_num_threads()
        context.Process(target=_serve, args=arguments, daemon=True).start()
        theirs.close()  # so that their end is seen

    def __call__(self) -> torch.Tensor:
        """Runs once, and returns the result of the model as float32."""
        return torch.from_numpy(self._ask(0))

    def timeit(self, number: int) -> float:
        """Returns the seconds that so many runs take, after one that is not timed."""
        return float(self._ask(number))

    def _ask(self, number: int) -> Any:
        self._connection.send(number)
        answer = self._connection.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


def _serve(connection: Connection, pickled: bytes, num_threads: int) -> None:
    """Answers numbers of runs by seconds, and 0 by a result, until the other end is closed."""
    torch.set_num_threads(num_threads)
    contender, workload, settings = pickle.loads(pickled)
    run: Any = None
    while True:
        try:
            number = connection.recv()
        except EOFError:
            return
        answer: Any
        try:
            run = run or prepare(contender, workload, settings)
            if number:
                answer = timeit.Timer(run, run, timer=benchmark.timer).timeit(number)
            else:
                with compiling(contender):
                    answer = run().float().numpy()
        except Exception as error:  # noqa: BLE001
            answer = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        connection.send(answer)
