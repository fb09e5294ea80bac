"""vLLM as a rollout engine: `server` is the trainer's side, `engine` runs in vLLM's worker, `plugin` puts it there."""
