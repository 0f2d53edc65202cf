from common.stats import Stats


def test_parts_of_a_step_add_up_to_the_whole() -> None:
    documents = [{"id": f"{n:016x}", "text": "x" * n * 100, "meta": {"source": "ab"[n % 2]}} for n in range(40)]
    whole, parts = Stats("s"), [Stats("s"), Stats("s")]
    for number, document in enumerate(documents):
        for stats in (whole, parts[number % 2]):
            list(stats.counted([document]))
            if number % 3:
                stats.drop("odd" if number % 2 else "even", document)
            else:
                stats.keep(document)
    parts[1].add(parts[0])
    seconds = {"seconds": 0}
    assert parts[1].as_dict() | seconds == whole.as_dict() | seconds
    odd = [{"id": f"{n:016x}", "text": "x" * min(n * 100, 200)} for n in range(40) if n % 3 and n % 2]
    assert whole.as_dict()["examples"]["odd"] == odd[:10]


def test_the_values_that_are_counted_are_bounded_and_the_most_frequent_are_written() -> None:
    stats, other = Stats("s"), Stats("s")
    for number in range(1100):
        stats.keep({"text": "xy", "meta": {"source": f"{number:04d}" + "y" * 200}})
        other.keep({"text": "é", "meta": {"source": f"{number % 60:04d}" + "y" * 96}})
    stats.add(other)
    assert len(stats.kept_by["source"]) == 1000
    (first, counts), *rest = stats.as_dict()["kept_by"]["source"].items()
    assert (first, counts, len(rest)) == ("0000" + "y" * 96, {"documents": 20, "bytes": 40}, 49)
