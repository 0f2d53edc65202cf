from collections import Counter

from common.stats import Stats


def test_the_table_lists_every_reason_with_its_share() -> None:
    stats = Stats("blacklist", documents_in=2000, documents_out=1500, reasons=Counter(short=100, domain=400))
    assert stats.table().splitlines() == [
        "blacklist:",
        "  kept            1,500   75.0 %",
        "  domain            400   20.0 %",
        "  short             100    5.0 %",
        "  all             2,000  100.0 %",
    ]
