# An image for clusters (docs/clusters/kubernetes.md):
#
#   docker build -t REGISTRY/dilocox_jax:TAG .
#
# Other extras of setup.py: --build-arg EXTRAS=experiments,tpu,text. The image
# has not been built yet; the command below was run outside of a container.

FROM python:3.12-slim
ARG EXTRAS=experiments,gpu,text
WORKDIR /dilocox_jax
COPY . .
RUN python -m pip install --no-cache-dir \
  --constraint constraints/py312.txt --editable ".[$EXTRAS]"
