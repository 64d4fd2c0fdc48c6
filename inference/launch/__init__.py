"""`sqlenv inference`: vLLM servers planned, started, watched and ended."""
