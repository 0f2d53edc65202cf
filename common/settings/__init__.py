"""The configuration as typed models: every key with its meaning, unit and default."""

from common.settings.cluster import ClusterSettings, GpuSettings, SiteSettings
from common.settings.corpus import (
    CleanSettings,
    CorpusSettings,
    DecontaminateSettings,
    DedupSettings,
    FastTextModel,
    RepeatsSettings,
    TokenizeSettings,
    TrainTokenizerSettings,
)
from common.settings.experiment import DataSettings, Experiment
from common.settings.model import ModelSettings, ParallelSettings
from common.settings.run import Settings, closest
from common.settings.section import Section, changes, names
from common.settings.sources import WARC_NAME, BlacklistSettings, FetchSettings, ScrapeSettings, SourceSettings
from common.settings.training import GenerateSettings, LogSettings, TrainSettings, WatchSettings
