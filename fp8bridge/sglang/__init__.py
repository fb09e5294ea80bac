"""Stock SGLang servers: `server` is the trainer's side of one, `loader` runs inside it. None imports SGLang."""
