"""Reads the settings again, on a signal or when a file has changed, and puts them in force as one whole.

A running stream keeps what it began with. Settings that can't be used leave the old ones in force, and say why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.metrics import Metrics
from gateway.settings.errors import SettingsError
from gateway.settings.importers import LoadedSettings
from gateway.settings.reloading import take_over
from gateway.settings.schema import Settings
from gateway.settings.watching import FileWatch
from gateway.web.generation import Generation, InForce, ReloadState

POLL_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """Where the settings come from. `load` reads all of it anew; `learn` is told of settings before they are used."""

    loaded: LoadedSettings
    load: Callable[[], LoadedSettings]
    learn: Callable[[Settings], None] = lambda settings: None


Make = Callable[[int, Settings, Sequence[str], Generation], Generation]


class Reloader:
    def __init__(self, source: Source, in_force: InForce, make: Make, metrics: Metrics) -> None:
        self.state = ReloadState(in_force.current.number, time.time())
        self._source = source
        self._in_force = in_force
        self._make = make
        self._metrics = metrics
        self._watch = FileWatch(source.loaded.files)
        self._files = tuple(source.loaded.files)
        self._asked = asyncio.Event()
        self._metrics.settings_loaded(self.state.loaded_at)

    def ask(self) -> None:
        """Read the settings again soon. May be called from a signal handler of the loop."""
        self._asked.set()

    async def run(self, poll_seconds: float = POLL_SECONDS) -> None:
        """For ever. Looks at the files only if the settings want it."""
        watches = self._in_force.current.settings.server.watch_settings
        while True:
            if await self._is_asked(poll_seconds if watches else None):
                logger.info("the settings are read again: a signal asked for it")
                await self.reload()
            elif await asyncio.to_thread(self._watch.has_changed):
                logger.info("the settings are read again: a file has changed")
                await self.reload()

    async def _is_asked(self, seconds: float | None) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._asked.wait()
        except TimeoutError:
            return False
        self._asked.clear()
        return True

    async def reload(self) -> None:
        """Take over what is there now, or say why not."""
        try:
            loaded = await asyncio.to_thread(self._source.load)
            self._files = tuple(loaded.files)
            self._watch.watch(loaded.files)
            self._take(loaded)
        except SettingsError as error:
            self._watch.watch_too(error.files)
            self._refuse(error.problems, error.files)
        except Exception:
            logger.exception("the settings could not be read again; the old ones stay in force")
            self._refuse(("the settings could not be read; the log says why",))

    def _take(self, loaded: LoadedSettings) -> None:
        old = self._in_force.current
        settings, left = take_over(old.settings, loaded.settings)
        self._source.learn(settings)
        notices = loaded.notices
        if left:
            notices += (f"these changes take effect after a restart: {', '.join(left)}",)
        new = self._make(old.number + 1, settings, notices, old)
        self._in_force.replace(new)
        self.state = ReloadState(new.number, time.time(), needs_restart=left)
        self._metrics.settings_loaded(self.state.loaded_at)
        logger.info("settings %d are in force", new.number)
        for notice in notices:
            logger.warning("%s", notice)

    def _refuse(self, problems: Sequence[str], named: Collection[Path] = ()) -> None:
        files = (*self._files, *named)
        shown = tuple(_without_folders(problem, files) for problem in problems)
        self.state = replace(self.state, failed_at=time.time(), problems=shown)
        self._metrics.settings_refused()
        for problem in problems:
            logger.error("%s", problem)
        logger.error("the settings were not taken over: those of before stay in force")


def _without_folders(text: str, files: Sequence[Path]) -> str:
    """Whoever probes the gateway need not learn where its files are."""
    for file in files:
        text = text.replace(f"{file.parent}/", "")
    return text
