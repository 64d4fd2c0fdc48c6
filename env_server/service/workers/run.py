"""A server's processes: one that serves by itself, or a parent that keeps `--workers` of them (`supervisor`).

The sockets are bound first, so that an address in use is said at once; the data set is loaded once, whatever the number
of workers.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset
from env_server.service.capacity import Capacity
from env_server.service.logs import BackgroundHandler, LineHandler, configure, log
from env_server.service.metrics import Metrics
from env_server.service.settings import ServiceSettings
from env_server.service.workers.listening import close_all, listen, url_of
from env_server.service.workers.supervisor import Supervisor
from env_server.service.workers.worker import AppFactory, run_worker
from env_server.test_suites.building import Progress, build_suites
from env_server.types import AnswerMode

Announce = Callable[[str], None]


def load_data(settings: ServiceSettings, progress: Progress | None = None) -> Dataset:
    """Load the data set of the settings, and make what test databases its questions lack in `sql` mode.

    `progress` is of the latter. Raises DataError.
    """
    limits = settings.environment
    dataset = load_dataset(
        settings.data, answer_mode=settings.answer_mode, settings=limits, cache_dir=settings.cache_dir
    )
    if settings.answer_mode is AnswerMode.SQL and limits.judging.variants:
        build_suites(dataset.databases, dataset.questions, limits.sandbox, settings.cache_dir, progress=progress)
    return dataset


def serve(
    settings: ServiceSettings,
    create_app: AppFactory | None = None,
    *,
    load: Callable[[ServiceSettings], Any] = load_data,
    announce: Announce | None = None,
) -> int:
    """Serve until a stop signal; return the exit status. `announce` is called with the URL once it is served.

    Raises ListenError, DataError, StartError, WorkersFailedError.
    """
    configure(settings.log_level, LineHandler())
    # Here and in the query processes, which inherit it: the same answer on every machine.
    os.environ["TZ"] = "UTC"
    time.tzset()
    sockets = listen(settings.host, settings.port, settings.workers)
    try:
        factory = create_app or _application()
        dataset = load(settings)
        # The collector would write to every object that it looks at, and so unshare the workers' memory.
        gc.collect()
        gc.freeze()
        if settings.workers == 1:
            return _serve_alone(settings, dataset, factory, sockets[0], announce)
        return Supervisor(settings, dataset, factory, sockets, announce).run()
    finally:
        for each in sockets:
            close_all(each)


def _application() -> AppFactory:
    from env_server.service.app import create_app

    return create_app


def _serve_alone(
    settings: ServiceSettings,
    dataset: Any,
    create_app: AppFactory,
    sockets: list[socket.socket],
    announce: Announce | None,
) -> int:
    url = url_of(sockets)

    def ready() -> None:
        log(logging.INFO, "serving", url=url, workers=1)
        if announce is not None:
            announce(url)

    configure(settings.log_level, BackgroundHandler())
    try:
        capacity = Capacity(settings.max_sessions, settings.queue_size)
        return run_worker(settings, dataset, create_app, sockets, capacity, Metrics(capacity), ready=ready)
    finally:
        configure(settings.log_level, LineHandler())
