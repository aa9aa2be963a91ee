"""What several folders of tests share: tiny models, made-up blocks and cards, links, daemons, CUDA on a CPU."""
