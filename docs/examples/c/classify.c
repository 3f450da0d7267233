/* The five best classes of a picture: classify model.ndlc picture.ppm
 * cc classify.c $(python -m needle.config --cflags --libs) -o classify
 * The model takes one picture (1, 3, H, W), normalised as torchvision's models expect; of the PPM file (P6, 8 bits) its middle
 * counts. */
#include <needle.h>
#include <stdio.h>
#include <stdlib.h>

static const float kMean[3] = {0.485f, 0.456f, 0.406f}, kDeviation[3] = {0.229f, 0.224f, 0.225f};

static int fail(const char *what) {
  fprintf(stderr, "%s\n", what);
  return 1;
}

/* Pixels (height, width, 3), or NULL. */
static unsigned char *read_ppm(const char *path, int *width, int *height) {
  unsigned char *pixels = NULL;
  int most = 0;
  FILE *file = fopen(path, "rb");
  if (!file) return NULL;
  if (fscanf(file, "P6 %d %d %d", width, height, &most) == 3 && most == 255 && fgetc(file) != EOF && *width > 0 &&
      *height > 0 && *width <= 65536 && *height <= 65536) {
    size_t bytes = (size_t)*width * (size_t)*height * 3;
    pixels = malloc(bytes);
    if (pixels && fread(pixels, 1, bytes, file) != bytes) {
      free(pixels);
      pixels = NULL;
    }
  }
  fclose(file);
  return pixels;
}

static void put_middle(const unsigned char *pixels, int width, int height, float *x, int rows, int columns) {
  int top = (height - rows) / 2, left = (width - columns) / 2;
  for (int c = 0; c < 3; c++)
    for (int i = 0; i < rows; i++)
      for (int j = 0; j < columns; j++) {
        float value = (float)pixels[((size_t)(top + i) * (size_t)width + (size_t)(left + j)) * 3 + (size_t)c] / 255.0f;
        *x++ = (value - kMean[c]) / kDeviation[c];
      }
}

int main(int argc, char **argv) {
  needle_model *model = NULL;
  needle_tensor image, scores;
  unsigned char *pixels = NULL;
  float *x = NULL, *y = NULL;
  int width = 0, height = 0, bad = 1;
  if (argc != 3) return fail("classify expects a model and a picture.");
  if (needle_open(argv[1], &model)) return fail(needle_last_error());
  if (needle_input(model, 0, 0, &image) || needle_output(model, 0, 0, &scores)) {
    fail(needle_last_error());
  } else if (image.rank != 4 || image.shape[0] != 1 || image.shape[1] != 3 || image.dtype != NEEDLE_FLOAT32 ||
             scores.dtype != NEEDLE_FLOAT32) {
    fail("classify expects a model of one picture in float32.");
  } else if (!(pixels = read_ppm(argv[2], &width, &height)) || height < image.shape[2] || width < image.shape[3]) {
    fail("classify expects a PPM file (P6) at least as large as the model's pictures.");
  } else if (!(x = malloc(image.bytes)) || !(y = malloc(scores.bytes))) {
    fail("There is no memory for a picture.");
  } else {
    const void *inputs[1];
    void *outputs[1];
    inputs[0] = x;
    outputs[0] = y;
    put_middle(pixels, width, height, x, (int)image.shape[2], (int)image.shape[3]);
    bad = needle_run(model, 0, inputs, outputs);
    if (bad) fail(needle_last_error());
    for (int place = 0; !bad && place < 5; place++) { /* the best one is printed and taken out */
      size_t best = 0;
      for (size_t i = 1; i < scores.bytes / sizeof *y; i++)
        if (y[i] > y[best]) best = i;
      printf("class %zu: %.9g\n", best, (double)y[best]);
      y[best] = -1e30f;
    }
  }
  free(pixels);
  free(x);
  free(y);
  needle_close(model);
  return bad;
}
