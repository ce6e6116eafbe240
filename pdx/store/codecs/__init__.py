"""What chunks are encoded by where they leave memory: lossless, or with a loss where a request asks for that."""
