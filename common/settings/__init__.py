"""The configuration as typed models: every key, its meaning, unit and default. `common.config` reads them from YAML."""

from common.settings.cluster import ClusterSettings, CorpusJobSettings, SiteSettings
from common.settings.corpus import (
    BlacklistSettings,
    CleanSettings,
    DecontaminateSettings,
    DedupSettings,
    GopherSettings,
    ScrapeSettings,
    SourceSettings,
    TokenizeSettings,
    TrainTokenizerSettings,
)
from common.settings.experiment import DataSettings, Experiment
from common.settings.gpu import GpuSettings
from common.settings.model import ModelSettings, ParallelSettings
from common.settings.run import (
    Settings,
    closest,
)
from common.settings.section import (
    Section,
)
from common.settings.training import (
    EvaluateSettings,
    GenerateSettings,
    LogSettings,
    TrainSettings,
    WatchSettings,
)

__all__ = [
    "BlacklistSettings",
    "CleanSettings",
    "ClusterSettings",
    "CorpusJobSettings",
    "DataSettings",
    "DecontaminateSettings",
    "DedupSettings",
    "EvaluateSettings",
    "Experiment",
    "GenerateSettings",
    "GopherSettings",
    "GpuSettings",
    "LogSettings",
    "ModelSettings",
    "ParallelSettings",
    "ScrapeSettings",
    "Section",
    "Settings",
    "SiteSettings",
    "SourceSettings",
    "TokenizeSettings",
    "TrainSettings",
    "TrainTokenizerSettings",
    "WatchSettings",
    "closest",
]
