from tests.workflow.provenance.test_trace import model  # noqa: F401 - a fixture
