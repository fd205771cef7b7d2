# The tuning service. Build it from a clone: docker build --tag dear-tune .
FROM python:3.12-slim
WORKDIR /source
COPY . .
# The constraints are those of the tests; torch, which they pin too, is not among the service's needs.
RUN pip install --no-cache-dir --constraint constraints.txt '.[service]'
RUN useradd --create-home dear
USER dear
WORKDIR /home/dear
EXPOSE 8000
# Inside a container every address is the container's own; who reaches it is decided by what is published.
CMD ["dear-tune", "serve", "--host", "0.0.0.0", "--insecure"]
