"""The scheduler: sans-IO, ints and numpy only.

It knows no device, clock, socket or text; the loops that drive it are in ``cardan.engine``.
"""

from cardan.scheduler.allowed import SampledWith, as_float32
from cardan.scheduler.core import Scheduler
from cardan.scheduler.events import DecodeLogged, FallbackLogged, LogEvent, PrefillLogged, RetractionLogged
from cardan.scheduler.ordering import SCHEDULE_POLICIES, OrderingContext, SchedulePolicy
from cardan.scheduler.outputs import OutputBatch, RequestOutput, SchedulerStats
from cardan.scheduler.request import Grammar, Request, RequestState, StopChecker
from cardan.scheduler.settings import SchedulerSettings
from cardan.scheduler.state import Scheduled

__all__ = [
    "SCHEDULE_POLICIES",
    "DecodeLogged",
    "FallbackLogged",
    "Grammar",
    "LogEvent",
    "OrderingContext",
    "OutputBatch",
    "PrefillLogged",
    "Request",
    "RequestOutput",
    "RequestState",
    "RetractionLogged",
    "SampledWith",
    "SchedulePolicy",
    "Scheduled",
    "Scheduler",
    "SchedulerSettings",
    "SchedulerStats",
    "StopChecker",
    "as_float32",
]
