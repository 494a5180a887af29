# Beam's job server for Spark 3, from the pinned modules of deploy/spark/pom.xml.
#   docker build -f deploy/containers/spark-job-server.Dockerfile \
#       -t dpsgd-spark-job-server:0.2.0 .
# The bases are pinned by version; pin them by digest once you have pulled them.
FROM maven:3.9.9-eclipse-temurin-17 AS build
WORKDIR /build
COPY deploy/spark/pom.xml .
RUN mvn --batch-mode --no-transfer-progress package

FROM eclipse-temurin:17.0.15_6-jre
COPY --from=build /build/target/spark-job-server-2.62.0.jar /opt/job-server.jar
# What Java 17 must allow Spark; the same as in tests/engines/harness/embedded.py.
ENV JDK_JAVA_OPTIONS="--add-opens=java.base/java.lang=ALL-UNNAMED --add-opens=java.base/java.lang.invoke=ALL-UNNAMED --add-opens=java.base/java.lang.reflect=ALL-UNNAMED --add-opens=java.base/java.io=ALL-UNNAMED --add-opens=java.base/java.net=ALL-UNNAMED --add-opens=java.base/java.nio=ALL-UNNAMED --add-opens=java.base/java.text=ALL-UNNAMED --add-opens=java.base/java.time=ALL-UNNAMED --add-opens=java.base/java.util=ALL-UNNAMED --add-opens=java.base/java.util.concurrent=ALL-UNNAMED --add-opens=java.base/java.util.concurrent.atomic=ALL-UNNAMED --add-opens=java.base/java.util.concurrent.locks=ALL-UNNAMED --add-opens=java.base/sun.nio.ch=ALL-UNNAMED --add-opens=java.base/sun.nio.cs=ALL-UNNAMED --add-opens=java.base/sun.security.action=ALL-UNNAMED --add-opens=java.base/sun.util.calendar=ALL-UNNAMED"
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["java", "-jar", "/opt/job-server.jar"]
