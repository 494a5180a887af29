# The launcher of the flex template: runs `dpsgd batches` with the template's parameters.
#   docker build -f deploy/dataflow/launcher.Dockerfile -t dpsgd-launcher:0.2.0 .
# Google publishes the launcher by moving tags: pin it by digest once you have pulled it.
FROM gcr.io/dataflow-templates-base/python311-template-launcher-base:latest AS launcher

FROM dpsgd-worker:0.2.0
COPY --from=launcher /opt/google/dataflow/python_template_launcher /opt/google/dataflow/python_template_launcher
USER 0:0
RUN pip install --no-cache-dir 'apache-beam[gcp]==2.77.0'
USER 10001:10001
COPY deploy/dataflow/launch.py /opt/dpsgd/launch.py
ENV FLEX_TEMPLATE_PYTHON_PY_FILE=/opt/dpsgd/launch.py
ENTRYPOINT ["/opt/google/dataflow/python_template_launcher"]
