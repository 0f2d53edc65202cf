from tests.training.test_trace import model  # noqa: F401 - a fixture
