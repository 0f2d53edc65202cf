from common.stats import Stats


def test_parts_of_a_step_add_up_to_the_whole() -> None:
    documents = [{"id": f"{n:016x}", "text": "x" * n * 100} for n in range(40)]
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
