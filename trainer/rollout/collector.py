"""Python's garbage collector while thousands of episodes are in flight: rarely, and not over what was there before.

A full collection looks at every object of the process, torch's and transformers' among them, and at each number of
each list of token ids: half a second and more, in which no episode goes on. While episodes are played, what was there
before is left out, and collections come when there is much to find. They are the process's: another thread's garbage
waits, too.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (500, 5, 800)
"""New objects before the youngest generation is looked at, and how many such looks before the older ones are.

Small looks, often, since each sees every id of the prompts that were made meanwhile. Measured with 2,000 episodes in
flight: at 500 objects the event loop is 16 to 20 ms late at the 99th percentile, at 2,000 it is 47 to 49 ms, with as
much processor time; the full looks that come by Python's own numbers took 500 ms each.
"""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect rarely while the block lasts, then as before; of blocks that overlap, while the first one lasts."""
    before = gc.get_threshold()
    if before == THRESHOLDS:
        yield
        return
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
