from tiers import lean_structlog as lean_structlog  # before any module imports structlog
